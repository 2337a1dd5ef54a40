"""The ground the rest stands on: the embedded stack (`local`) and Horovod's build (`horovod`). Imports nothing of ours."""
