"""Connects ranks to each other; sums and exchanges tensors.

`group_exchange` says what ranks do together, and `peers` is a rank's connection to the others.
`collective` has the two back ends for sums; `launcher.launch.choose_backend` picks one. Ranks
connect through `rendezvous`, `torch_store` and `host_name`. `mesh` sums small tensors,
`device_sums` those on GPUs. `transfers` are messages of pairs, of which `member_sums` are made.
"""
