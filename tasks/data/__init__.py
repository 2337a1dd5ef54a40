"""Training data: sources, file formats, arrays for the model, splits.

`sources` finds and fetches data; `formats` reads arrays and images. `stored_rows` says what is
stored of them, and `dataset` is what a model gets, with the split of `row_split`; `prepared` keeps
its arrays in files that all ranks of a machine read, by `row_file` if they are large.
`tables/` reads tables and makes arrays of their columns; `modalities/` has texts, images and time
series; `model_reader` reads what a model's source reads, `model_schema` derives its schema in
the sandbox, and `sample_faults` says what is wrong with a sample.
"""
