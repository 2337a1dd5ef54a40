"""The object store: its interface, and the two kinds, a folder and S3."""
