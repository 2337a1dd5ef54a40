"""Plans for devices whose memory does not hold a step: recomputation, or more micro-batches."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
from plans import DATA
from recorded_models import wide_structure

from trainwright.estimator.predict.step_time import predict_curve
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.allocate.recompute.recompute_words import names_in_words
from trainwright.tasks.allocate.timeline.simulated_plan import simulated_plan
from trainwright.tasks.errors import BadInput, Infeasible
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Pool

GPUS = ("nvidia-t4", "nvidia-a100-40gb")
_GIB = 2.0**30


@functools.cache
def _estimate(*limits: float) -> Estimate:
    """Of the first GPUs, with these memories in bytes."""
    structure = wide_structure()
    curves = [
        predict_curve(structure, None, device_type=kind).model_copy(
            update={"memory_limit_bytes": limit}
        )
        for kind, limit in zip(GPUS, limits, strict=False)
    ]
    return Estimate(
        mode="datasheet",
        gradient_bytes=float(structure.parameter_bytes),
        curves=curves,
        layers=[one.facts() for one in structure.layer_work],
        step=structure.recorded_step(),
    )


def _plan(*limits: float, most: int | None = None, batch: int = 256, **train: Any) -> Plan:
    """The plan for a GPU of each of these memories, of unlike types."""
    devices = [{"type": kind} for kind, _ in zip(GPUS, limits, strict=False)]
    pool = Pool.model_validate({"name": "p", "hosts": [{"name": "a", "devices": devices}]})
    job = Job.model_validate(
        {
            "name": "j",
            "data": {"uri": "builtin:digits"},
            "objective": {"minimize": "time"},
            "train": {"global_batch_size": batch, **train},
        }
    )
    return make_plan(job, pool, _estimate(*limits), DATA, most_accumulation=most)


def _recomputed(plan: Plan) -> dict[str, list[str]]:
    layout = plan.layout
    return {} if layout is None else {one.id: layout.recomputed(one.id) for one in plan.devices}


def _step_s(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_time_s.median


@functools.cache
def _plain_bytes() -> float:
    """The memory of a whole step on one GPU."""
    return _plan(1e12).devices[0].peak_memory_bytes


def test_nothing_is_recomputed_if_memory_holds_the_step() -> None:
    assert not any(_recomputed(_plan(1e12)).values())


@pytest.mark.parametrize("share", [0.95, 0.8, 0.7])
def test_a_device_that_does_not_hold_the_step_recomputes_some_of_it(share: float) -> None:
    limit = share * _plain_bytes()
    plan = _plan(limit, most=1)
    (device,) = plan.devices
    names = _recomputed(plan)[device.id]
    assert names
    assert all(one.startswith("blocks.") for one in names)
    assert device.peak_memory_bytes <= limit
    assert _step_s(plan) > _step_s(_plan(1e12))
    assert re.search(
        r"recompute blocks\.\S+.*: −\d+.* % memory, \+\d+.* % time", plan.layout_in_words
    )
    assert (
        simulated_plan(plan, _estimate(limit)).step.step_s
        > simulated_plan(_plan(1e12), _estimate(1e12)).step.step_s
    )


def test_less_memory_takes_no_less_time() -> None:
    times = [_step_s(_plan(share * _plain_bytes(), most=1)) for share in (0.7, 0.8, 1.0)]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.3])
def test_recomputing_is_chosen_only_if_it_takes_less_time_than_micro_batches(share: float) -> None:
    limit = share * _plain_bytes()
    chosen, without = _plan(limit), _plan(limit, layout={"recompute": "none"})
    assert not any(_recomputed(without).values())
    assert _step_s(chosen) <= _step_s(without)
    if any(_recomputed(chosen).values()):
        assert _step_s(chosen) < 0.9 * _step_s(without)


def test_each_kind_of_device_recomputes_what_its_own_memory_needs() -> None:
    limit = 0.6 * _plain_bytes()
    plan = _plan(limit, limit, most=1, batch=500)
    assert any(_recomputed(plan).values())
    assert all(one.peak_memory_bytes <= limit for one in plan.devices)
    plan = _plan(limit, 1e12, most=1, batch=500)
    assert not any(_recomputed(plan).get(one.id) for one in plan.devices if one.type == GPUS[1])


def test_memory_that_is_too_small_says_what_even_recomputation_needs() -> None:
    with pytest.raises(Infeasible, match="memory binds") as caught:
        _plan(0.3 * _GIB, batch=64)
    need = re.search(r"one sample takes ([\d.]+) GiB even with recomputation", str(caught.value))
    assert need is not None
    enough = (float(need[1]) + 0.05) * _GIB
    assert _plan(enough, batch=64).feasible


def test_without_recomputation_the_same_memory_is_infeasible() -> None:
    with pytest.raises(Infeasible, match="memory binds"):
        _plan(0.6 * _plain_bytes(), most=1, layout={"recompute": "none"})


def test_all_recomputes_on_any_memory() -> None:
    plan = _plan(1e12, layout={"recompute": "all"})
    assert all(_recomputed(plan).values())
    assert plan.devices[0].peak_memory_bytes < 0.7 * _plain_bytes()
    assert plan.layout_rule == "as train.layout says"


@pytest.mark.parametrize("layout", [{"dense": "factors"}, {"name": "averaging"}])
def test_all_is_refused_with_layouts_that_send_more_than_sums(layout: dict[str, str]) -> None:
    with pytest.raises(BadInput, match=r"train\.layout\.recompute: got 'all'; allowed with sums"):
        _plan(1e12, 1e12, layout={"recompute": "all", **layout})


def test_all_is_refused_if_the_estimate_does_not_know_the_step() -> None:
    estimate = _estimate(1e12).model_copy(update={"step": None})
    pool = Pool.model_validate(
        {"name": "p", "hosts": [{"name": "a", "devices": [{"type": GPUS[0]}]}]}
    )
    job = Job.model_validate(
        {
            "name": "j",
            "data": {"uri": "builtin:digits"},
            "train": {"layout": {"recompute": "all"}},
        }
    )
    with pytest.raises(BadInput, match="the estimate does not say what each module keeps"):
        make_plan(job, pool, estimate, DATA)


def test_all_that_does_not_fit_is_infeasible() -> None:
    with pytest.raises(Infeasible, match=r"one sample takes 0\.37 GiB even with recomputation"):
        _plan(0.3 * _GIB, layout={"recompute": "all"})


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["blocks.3", "blocks.4", "blocks.5"], "blocks.3–5"),
        (["blocks.0", "blocks.2", "blocks.3"], "blocks.0,2–3"),
        (["h.0.mlp", "h.1.mlp", "h.1.attention"], "h.0–1.mlp, h.1.attention"),
        (["stem", "head"], "stem, head"),
        (["blocks.0..blocks.3", "blocks.4..blocks.7"], "blocks.0–3, blocks.4–7"),
        (["stem..blocks.1", "h.2.norm..h.4.norm", "head"], "stem–blocks.1, h.2–4.norm, head"),
        ([f"part{letter}" for letter in "abcdef"], "parta, partb, partc, partd and 2 more"),
    ],
)
def test_modules_in_words(names: list[str], words: str) -> None:
    assert names_in_words(names) == words
