"""The DAGs: chains of operators, nothing but wiring.

`retrain` first; `chain` wires one operator per step.

`python -m trainwright.dags` runs the `retrain` DAG in this process.
"""
