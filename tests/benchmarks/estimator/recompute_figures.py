"""Recomputation: `python tests/benchmarks/estimator/recompute_figures.py [--cases N] …`.

Three tables, of real steps on one core. A transformer of 24 blocks: memory of activations saved and
time added at some caps. The largest depth that a capped memory can train, with and without. And
held-out families at caps of 30, 50 and 70 % of the plain peak: the measured peak of torch's CPU
allocator against the cap and against the prediction.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import allocator
import torch
from torch import nn
from torch.nn import functional
from zoo import Case, cases

from trainwright.estimator.memory.recompute_choice import ChosenModules
from trainwright.estimator.memory.recompute_names import ends_of
from trainwright.estimator.predict.step_time import predict_curve
from trainwright.estimator.structure import Structure
from trainwright.estimator.trace.cuts.model_cuts import cut_step
from trainwright.estimator.trace.trace import trace
from trainwright.tasks.allocate.recompute.recomputing_curves import RecomputingCurves, forward_s
from trainwright.tasks.train.pipeline.recomputed_model import recompute_in

CAPS = (0.3, 0.5, 0.7)
_WIDTH, _TOKENS, _HEADS, _VOCABULARY = 64, 128, 4, 64


class Block(nn.Module):
    """Attention and a feed-forward part, each with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.joint, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        batch = len(inputs)
        parts = self.joint(self.first(inputs)).view(batch, _TOKENS, 3, _HEADS, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        inputs = inputs + self.out(seen.transpose(1, 2).reshape(batch, _TOKENS, _WIDTH))
        return inputs + self.mlp(self.second(inputs))


class Transformer(nn.Module):
    """A small language model of some depth."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.embedding(tokens)
        for block in self.blocks:
            found = block(found)
        return self.head(found)


def transformer(depth: int, batch_size: int) -> Case:
    """Its training step."""

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(_VOCABULARY, (size, _TOKENS))
        return tokens, tokens.roll(-1, 1)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    return Case(
        "transformer",
        f"of {depth} blocks",
        lambda: Transformer(depth),
        batch,
        loss,
        batch_size,
        "adamw",
    )


def recomputing(case: Case, names: Sequence[str]) -> Case:
    """The case with these modules recomputed, as ranks do it."""

    cut = functools.cache(lambda: cut_step(case.spec()))
    if any(first != last for first, last in map(ends_of, names)):
        cut()  # not within the measured step

    def build() -> nn.Module:
        model = case.build()
        recompute_in(model, names, cut)
        return model

    return replace(case, build=build)


def chosen(structure: Structure, batch_size: int, cap: float) -> ChosenModules | None:
    """The planner's choice for a cap on the peak of tensors, by predicted times of layers."""
    step = structure.recorded_step()
    if step is None:
        return None
    curve = predict_curve(structure, None, device_type="cpu")
    curves = RecomputingCurves(step, structure.units)
    choice = curves.choice(batch_size)
    seconds = {name: forward_s(curve, [name], batch_size) for name in choice.names}
    return choice.cheapest(cap, seconds)


def slower(case: Case, names: Sequence[str], rounds: int) -> float:
    """How much more CPU time a step takes with these modules recomputed: medians of turns."""
    steps = [case.step(), recomputing(case, names).step()]
    took: list[list[float]] = [[], []]
    for turn in range(rounds + 1):
        for step, times in zip(steps, took, strict=True):
            started = time.process_time()
            step()
            if turn:
                times.append(time.process_time() - started)
    plain, again = map(statistics.median, took)
    return again / plain - 1


def blocks(depth: int, batch_size: int, rounds: int) -> None:
    """Memory of activations saved against time added."""
    case = transformer(depth, batch_size)
    structure = trace(case.spec(), batch_size)
    plain = allocator.peak_bytes(case)
    idle = structure.idle_bytes(batch_size)
    print(f"{case.label}: plain peak {plain / 2**20:.0f} MiB, {idle / 2**20:.0f} of them idle")
    for share in (0.8, 0.6, 0.4, 0.3, 0.2):
        found = chosen(structure, batch_size, idle + share * (plain - idle))
        if found is None:
            print(f"  activations {share:.0%}: no choice")
            continue
        measured = allocator.peak_bytes(recomputing(case, found.names))
        saved = 1 - (measured - idle) / (plain - idle)
        longer = slower(case, found.names, rounds)
        print(
            f"  {len(found.names)} modules: activations -{saved:.0%}, time {longer:+.0%}, "
            f"predicted peak {found.peak_bytes / measured - 1:+.1%}",
            flush=True,
        )


def depths(plain_depth: int, batch_size: int) -> None:
    """The largest depth within the memory of a plain step of `plain_depth` blocks."""
    cap = allocator.peak_bytes(transformer(plain_depth, batch_size))
    depth, fits = plain_depth, None
    while True:
        case = transformer(depth + plain_depth, batch_size)
        structure = trace(case.spec(), batch_size)
        found = chosen(structure, batch_size, cap)
        if found is None:
            break
        depth, fits = depth + plain_depth, (case, found)
    measured = cap if fits is None else allocator.peak_bytes(recomputing(fits[0], fits[1].names))
    print(
        f"depth within {cap / 2**20:.0f} MiB: {plain_depth} blocks without, {depth} with "
        f"({depth / plain_depth:.1f} times), measured peak {measured / cap:.3f} of it",
        flush=True,
    )


def families(count: int, seed: int, rounds: int) -> None:
    """Held-out families at caps below the plain peak."""
    errors, feasible, kept, idle = [], 0, 0, 0
    tried = 0
    for case in cases(seed, count):
        structure = trace(case.spec(), case.batch_size)
        plain = allocator.peak_bytes(case)
        for share in CAPS:
            tried += 1
            idle += structure.idle_bytes(case.batch_size) > share * plain
            found = chosen(structure, case.batch_size, share * plain)
            if found is None:
                continue
            gc.collect()
            measured = allocator.peak_bytes(recomputing(case, found.names))
            feasible += 1
            kept += measured <= share * plain
            errors.append(abs(found.peak_bytes / measured - 1))
            longer = f", time {slower(case, found.names, rounds):+.0%}" if rounds else ""
            print(
                f"{case.label:50} cap {share:.0%}: measured {measured / plain:.1%}, "
                f"{len(found.names)} modules{longer}",
                flush=True,
            )
    errors.sort()
    print(
        f"{tried} cases: {feasible} called feasible, {kept} of them within the cap; in {idle}, "
        "parameters, gradients and optimizer alone exceed it"
    )
    if errors:
        tenth = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
        print(f"predicted peak: median error {statistics.median(errors):.2%}, p90 {tenth:.2%}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=14, help="held-out models, three caps each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--depth", type=int, default=24, help="blocks of the first table; 0: none")
    parser.add_argument("--batch", type=int, default=16, help="samples of the transformers")
    parser.add_argument(
        "--plain-depth", type=int, default=4, help="blocks that fit without; 0: no such table"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed turns; 0: families untimed")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.depth:
        blocks(given.depth, given.batch, max(1, given.rounds))
    if given.plain_depth:
        depths(given.plain_depth, given.batch)
    families(given.cases, given.seed, given.rounds)


if __name__ == "__main__":
    main()
