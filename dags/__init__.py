"""The DAGs. They only wire operators together.

`retrain` first; `chain` wires one operator per step.

`python -m trainwright.dags` runs the `retrain` DAG in this process.
"""
