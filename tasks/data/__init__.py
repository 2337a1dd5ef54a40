"""Training data: sources, file formats, arrays for the model, splits.

`sources` finds and fetches data, `formats` reads files, `dataset` makes arrays and the split,
`prepared` keeps the arrays in files that all ranks of a machine map.
"""
