"""The object store: its interface, and two implementations, a folder and S3."""
