"""Divides a model into units, the parts between places where it can be cut. Loads torch.

`model_cuts` first: it makes a CutModel. `call_recorder` records the calls of a forward pass, with
`torch_patches` for what torch does not show, `known_calls` for what is known of functions, and
`seen_tensors` for where tensors come from. `batch_sizes` joins recordings of several batch sizes
into a `forward_graph`; `unit_layers` says which layers are in a unit.
"""
