"""Plans of models of alike blocks that can be cut between any two."""

from __future__ import annotations

from typing import Any

from layout_cases import LOSS, convolution
from layout_plans import case
from stage_cases import unit_of

from trainwright.estimator.curves import Affine
from trainwright.estimator.structure import LayerFacts, Unit
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import Plan

BLOCKS = 8
KEPT = Affine(fixed=0.0, per_sample=4e5)


def blocks(elements: int = 1_000_000, kept: Affine = KEPT) -> list[LayerFacts]:
    """Alike blocks, most of whose memory are activations and parameters."""
    own = [convolution(f"blocks.{number}", elements) for number in range(BLOCKS)]
    return [*(one.model_copy(update={"kept_bytes": kept}) for one in own), LOSS]


def units_of(layers: list[LayerFacts], crossing: float = 1e4) -> list[Unit]:
    return [unit_of(one.name, [one.name], crossing) for one in layers[:-1]]


def pipeline_plan_and_estimate(
    layers: list[LayerFacts] | None = None,
    units: list[Unit] | None = None,
    not_cut: str = "",
    **options: Any,
) -> tuple[Plan, Estimate]:
    """The plan of a model of blocks on two hosts, unless the options say otherwise."""
    layers = blocks() if layers is None else layers
    job, pool, estimate, data = case(layers, **options)
    cut = units_of(layers) if units is None else units
    known = estimate.model_copy(update={"units": cut, "not_cut": not_cut})
    return make_plan(job, pool, known, data), known
