"""Tables: read in batches, and made into arrays for the model.

`table_source` reads files in record batches and `column_scan` sees what their columns hold;
`table_arrays` makes input arrays of the columns, `target_column` numbers of the target.
`arrow_numpy` converts between Arrow and NumPy without pandas.
"""
