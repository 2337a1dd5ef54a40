"""Training data: sources, file formats, arrays for the model, splits.

`sources` finds and fetches data, `formats` reads files, `dataset` makes arrays and the split.
"""
