"""Predicts how a model will do on a data set from known sets that resemble it.

Read `metric_prediction` first. `data_figures` has the figures by which sets are compared,
`benchmark_table` reads what was measured: benchmark.csv, which is shipped with the package.
"""
