"""Connects ranks to each other and sums tensors.

`collective` has the two back ends; `launcher.launch.choose_backend` picks one, and `peers` opens
it. Ranks connect through `rendezvous`, `torch_store` and `host_name`. `mesh` sums small tensors.
"""
