"""How many known models can be cut into stages, and whether the stages compute the same.

    python tests/benchmarks/train/cut_models.py [--count 36] [--seed 5] [--stages 4]

The models are those of `tests/benchmarks/estimator/zoo`, families in turn. Each is cut into stages
at random places; the stages run one after another in this process, with dropout. Printed are the
seconds that it takes to find the places, the units between them, and the largest difference of an
output and of a parameter's gradient from those of the whole model, in fp32.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "estimator"))

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from zoo import Case, cases

from trainwright.estimator.trace.cuts.model_cuts import CutModel, cut
from trainwright.tasks.train.passes import keyed_dropout
from trainwright.tasks.train.pipeline.stage_model import MicroBatchPass, StageModel

SAMPLES = 3
KEY = (1, 2, 0, SAMPLES)
"""Seed, step, first sample and samples of the masks of dropout."""


def main() -> None:
    """Print a line for each model, then the totals."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=36)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--stages", type=int, default=4)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    keyed_dropout.install()
    families, refused, worst, spent = set(), [], 0.0, []
    for case in cases(asked.seed, asked.count):
        families.add(case.family)
        began = time.perf_counter()
        found = cut(case.build, lambda size, case=case: case.example_batch(size)[0])
        spent.append(time.perf_counter() - began)
        if found.not_cut:
            refused.append(case.family)
            print(f"{case.family:<18} {spent[-1]:5.1f} s  none: {found.not_cut}", flush=True)
            continue
        apart = differences(case, found, asked.stages)
        worst = max(worst, *apart)
        print(
            f"{case.family:<18} {spent[-1]:5.1f} s  {len(found.units):>3} units  outputs "
            f"{apart[0]:.1e}  gradients {apart[1]:.1e}",
            flush=True,
        )
    print(
        f"{asked.count - len(refused)} of {asked.count} models of {len(families)} families cut; "
        f"largest difference {worst:.1e}; median {sorted(spent)[len(spent) // 2]:.1f} s"
    )


def differences(case: Case, found: CutModel, count: int) -> tuple[float, float]:
    """The largest differences of outputs and of gradients between stages and the whole model."""
    torch.manual_seed(1)
    whole = case.build()
    parts = copy.deepcopy(whole)
    inputs = case.example_batch(SAMPLES)[0]
    places = range(1, len(found.units))
    chosen = sorted(random.Random(case.name).sample(places, min(count - 1, len(places))))
    ends = [0, *chosen, len(found.units)]
    torch.manual_seed(2)
    keyed_dropout.begin_pass(*KEY)
    outputs = whole(inputs)
    gradients = [torch.randn_like(one) for one in tree_leaves(outputs)]
    torch.autograd.backward(tree_leaves(outputs), gradients)
    torch.manual_seed(2)
    passes: list[MicroBatchPass] = []
    values: Any = inputs
    for stage in (StageModel(parts, found, *pair) for pair in itertools.pairwise(ends)):
        keyed_dropout.begin_pass(*KEY, stage.first_dropout)
        passes.append(MicroBatchPass(stage, values, SAMPLES))
        values = passes[-1].outputs
    back: Any = gradients
    for one in reversed(passes):
        back = one.backward(back)
    keyed_dropout.end_pass()
    return (
        largest(zip(tree_leaves(outputs), tree_leaves(values), strict=True)),
        largest(pair for pair in zip(of(whole), of(parts), strict=True)),
    )


def of(model: nn.Module) -> list[torch.Tensor]:
    """The gradients of the parameters; zeros for those that have none."""
    return [torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()]


def largest(pairs: Any) -> float:
    """The largest difference in pairs of tensors."""
    return max(float((one - two).abs().max()) for one, two in pairs)


if __name__ == "__main__":
    main()
