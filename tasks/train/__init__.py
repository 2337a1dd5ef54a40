"""Training on unlike devices: one rank for each device of the plan, each with its own batch and share of the CPU.

    launch, ranks, outcome   start a training, hear its ranks, gather what they did                           (no torch)
    request                 what the launcher asks of ranks, and what they answer                              (no torch)
    rank_processes, processes, membership   what runs for each device; who forms the next world               (no torch)
    cpu_share               holds a rank to its share of the CPU                                               (no torch)
    worker, stand_back, member, replica, rank, loop, agree   a rank: its process, its model, a step, all steps, a new world
    ramp, snapshot          the learning-rate search on a rank, which leaves it as it was
    world, channel          where ranks meet; what ranks and launcher say to each other
    hosts, session, remote, preloading, returning   the same on other hosts, over ssh: the launcher's side     (no torch)
    node, preload, equality, launcher_store   what runs there, and how ranks there keep things                 (no torch)
    rendezvous, meeting, own_name, torchrun   how ranks find each other, here, there and under torchrun
    fleet, watchdog, divergence   who may take part; who hangs; when the loss has run away                     (pure)
    batches, rebalance      which samples a rank takes; when the split changes                                 (pure)
    batch_split             the global batch and the members' shares of it, as they are from step to step
    noise_scale, adaptive_batch, halves   what a larger batch would bring; when it grows, and the learning rate with it
    collective, mesh, peers, gradients, batch_norm   make n unequal ranks equal one process on the joint batch
    optimization            the optimizer, and the learning rate at each step
    loss_scale              keeps fp16 gradients from vanishing, the same on all ranks                        (pure)
    measure_loop            measures what all this adds to a model's step, for calibration
    figures, events, tensorboard   what each rank spends its steps on; what is said of it; TensorBoard's files
    metrics, journal        the rows of steps; where they are until the store has them
    checkpoint              what is kept, and where
    fence, confirmations    which checkpoints count, and when one is whole
    saver, checkpoint_writer, spill, tensors, shards   write it while training goes on, also while the store is away

`train` and `search` are the two things a caller needs (`ramp` is a search without trials).
"""

from __future__ import annotations

from trainwright.tasks.train.launch import ramp, search, train
from trainwright.tasks.train.request import RampPoint, Searched, TrainRequest

__all__ = ["RampPoint", "Searched", "TrainRequest", "ramp", "search", "train"]
