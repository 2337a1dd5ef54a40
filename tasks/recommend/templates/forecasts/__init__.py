"""Families of models that forecast time series.

`forecast_parts` has what all of them share; every other module is one family.
"""
