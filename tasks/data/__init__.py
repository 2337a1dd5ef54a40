"""Training data: sources, file formats, arrays for the model, splits."""
