"""Data as a model gets it: sources, file formats, splits."""
