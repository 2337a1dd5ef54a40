"""Step `export`: writes a finished run's model in a form that needs no torch.

Every kind of export takes an `exportable` model and writes files into a folder.
"""
