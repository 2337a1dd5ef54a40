"""What the rest stands on: the embedded stack (`local`), Horovod's build (`horovod`), the sandbox.

Imports no other package of trainwright.
"""
