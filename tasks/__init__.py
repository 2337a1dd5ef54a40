"""What each step does, in plain Python without Airflow. `chain` has the steps and their order."""
