"""The DAGs: chains of operators, nothing but wiring.

`python -m trainwright.dags` runs the `retrain` DAG in this process.
"""
