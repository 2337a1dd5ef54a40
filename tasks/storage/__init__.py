"""The object store: its interface, and two implementations, a folder and S3.

`objects` is the interface, `folder` and `s3` implement it, `connect` opens one of them by URI.
"""
