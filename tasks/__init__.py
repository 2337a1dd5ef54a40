"""The work of each step, in plain Python without Airflow. `chain` defines the steps' order."""
