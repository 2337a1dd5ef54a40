"""How the copies of layers on several ranks are kept equal.

Each strategy is a module with its equations: `gradients` sums those of unequal batches,
`batch_norm` their statistics; `late_multiply`, `sharded`, `averaging`. A rank's `LayoutWork` holds
those of its
layout, `cut_tensors` are tensors of which it has some rows.
"""
