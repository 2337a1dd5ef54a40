"""Why no pipeline is feasible: which memory or link would have to be how large."""

from __future__ import annotations

import re
from typing import Any

import pytest
from layout_plans import case
from pipeline_cases import blocks, pipeline_plan_and_estimate, units_of

from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.errors import Infeasible
from trainwright.tasks.runs.artefacts.plan import Plan

PROCESS = 1.5e8


def planned(*args: Any, **options: Any) -> Plan:
    return pipeline_plan_and_estimate(*args, **options)[0]


def refused(*args: Any, **options: Any) -> Infeasible:
    with pytest.raises(Infeasible) as caught:
        planned(*args, **options)
    return caught.value


@pytest.mark.parametrize("layout", ["pipeline", {"stages": 2, "replicas": 2, "micro_batches": 4}])
def test_the_answer_says_how_large_which_memory_would_have_to_be(layout: Any) -> None:
    layers = blocks(elements=8_000_000)
    error = refused(layers, memory=2.5e8, layout=layout, hosts=4)
    said = re.search(
        r"memory binds: train.layout: layout pipeline: host-\d/cpu-0 needs (0\.\d+) GiB for "
        r"blocks\.\d–blocks\.\d and has 0\.233; most is for blocks\.\d$",
        str(error),
    )
    assert said is not None
    assert error.details["binding"] == "memory"
    assert error.details["memory_bytes"] == 2.5e8
    need = error.details["needed_bytes"]
    assert isinstance(need, int)
    assert need == pytest.approx(float(said[1]) * 2**30, rel=0.01)
    assert planned(layers, memory=1.02 * need, layout=layout, hosts=4).feasible


@pytest.mark.parametrize("layout", ["pipeline", "auto"])
def test_a_memory_below_what_a_process_takes_is_named_with_what_the_process_takes(
    layout: str,
) -> None:
    layers = blocks()
    job, pool, estimate, data = case(layers, memory=1e8, layout=layout)
    curves = [one.model_copy(update={"process_bytes": PROCESS}) for one in estimate.curves]
    known = estimate.model_copy(update={"curves": curves, "units": units_of(layers)})
    with pytest.raises(
        Infeasible, match=r"needs 0\.\d+ GiB for blocks.* and has 0\.0931; its "
    ) as why:
        make_plan(job, pool, known, data)
    assert "its process alone takes 0.14" in str(why.value)
    assert why.value.details["memory_bytes"] == 1e8


def test_the_planners_own_answer_names_the_pipeline_that_comes_closest() -> None:
    layers = blocks(elements=8_000_000)
    error = refused(layers, memory=2.5e8, hosts=4)
    assert re.search(
        r"memory binds: a global batch of 64 does not fit; one sample takes 1\.\d\d GiB, cpu has "
        r"0\.23 GiB.*; nearest with layout pipeline on 4 devices: host-\d/cpu-0 needs 0\.\d+ GiB",
        str(error),
    )
    need = error.details["needed_bytes"]
    assert isinstance(need, int)
    assert error.details["layout"] == "pipeline"
    assert planned(layers, memory=1.02 * need, hosts=4).feasible
    uncut = refused(layers, [], memory=2.5e8, hosts=4)
    assert "nearest with" not in str(uncut)
    assert uncut.details["needed_bytes"] > need  # type: ignore[operator]


def test_a_pipeline_that_alone_fits_but_is_too_slow_has_its_own_nearest_deadline() -> None:
    layers = blocks(elements=8_000_000)
    tight = {"minimize": "time", "deadline": "2s"}
    error = refused(layers, memory=4e8, hosts=4, objective=tight)
    assert re.search(
        r"the deadline of 2 s binds: the nearest that was found with layout pipeline is [\d.]+ s",
        str(error),
    )
    nearest = error.details["nearest_deadline_s"]
    enough = {"minimize": "time", "deadline": f"{nearest}s"}
    assert planned(layers, memory=4e8, hosts=4, objective=enough).feasible


def test_the_answer_says_which_link_would_be_enough_for_the_jobs_pipeline() -> None:
    wanted = {"stages": 2, "micro_batches": 8}
    layers = blocks()
    slow = {"units": units_of(layers, 1e5), "layout": wanted}
    plan = planned(layers, network="10Gbit", **slow)
    assert plan.not_exceeded is not None
    deadline = {"minimize": "time", "deadline": f"{1.05 * plan.not_exceeded.duration_s:.3f}s"}
    error = refused(layers, objective=deadline, network="100Mbit", **slow)
    said = re.search(
        r"the deadline of [\d.]+ s binds: the nearest that was found with layout pipeline is "
        r"[\d.]+ s; ([\d.]+) Gbit/s between machines would be enough$",
        str(error),
    )
    assert said is not None
    assert planned(layers, objective=deadline, network=f"{said[1]}Gbit", **slow).feasible
    tight = {"minimize": "time", "deadline": "1s"}
    assert re.search(
        r"layout pipeline is [\d.]+ s$",
        str(refused(layers, objective=tight, network="100Mbit", **slow)),
    )


def test_the_answer_says_which_link_would_be_enough_for_any_layout() -> None:
    layers = blocks()
    plan = planned(layers, [], network="10Gbit")
    assert plan.not_exceeded is not None
    deadline = {"minimize": "time", "deadline": f"{1.05 * plan.not_exceeded.duration_s:.3f}s"}
    error = refused(layers, [], objective=deadline, network="100Mbit")
    said = re.search(r"binds: .*; ([\d.]+) Gbit/s between machines would be enough ", str(error))
    assert said is not None
    assert planned(layers, [], objective=deadline, network=f"{said[1]}Gbit").feasible
