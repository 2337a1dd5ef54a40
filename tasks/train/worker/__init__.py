"""A rank's process: its start, the training loop, the learning-rate search.

`entry` starts the process, `member` loads and takes part in groups, `loop` trains. `state_sync`
gives a new group one state. `lr_ramp`, `lr_trials` and `lr_curve` search the learning rate, from a
`snapshot`. `torchrun` replaces the launcher. `measure_loop`, `measure_passes` and
`measure_process` measure what ranks of this machine cost besides their model.
"""
