"""How ranks find each other and sum tensors.

`collective` has the two back ends; `launcher.launch.choose_backend` picks one, and `peers` opens
it. `rendezvous`, `torch_store` and `host_name` are how ranks meet; `mesh` sums small values.
"""
