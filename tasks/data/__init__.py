"""Training data: sources, file formats, arrays for the model, splits.

`sources` finds and fetches data; `table_source` and `formats` read files. `stored_rows` says what
is stored of them: `column_scan` sees what a table holds, `table_arrays` and `target_column` make
arrays of it. `dataset` is what a model gets, with the split of `row_split`; `prepared` keeps its
arrays in files that all ranks of a machine read, by `row_file` if they are large.
`modalities/` has texts, images and time series; `model_reader` reads what a model's source reads.
"""
