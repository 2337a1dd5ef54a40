"""How pipelines keep dense layers equal: what the planner chooses, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from layout_cases import LOSS, convolution, dense_layer
from pipeline_cases import pipeline_plan_and_estimate
from stage_cases import unit_of

from trainwright.estimator.structure import LayerFacts, Unit
from trainwright.tasks.allocate.layouts.permitted import require_permitted
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.plan import Plan

LAYERS = [
    convolution("conv0", 2_000),
    dense_layer("fc1", 2048, 2048),
    convolution("conv2", 2_000),
    dense_layer("fc3", 2048, 2048),
    LOSS,
]
TWO = {"stages": 2, "replicas": 2, "micro_batches": 2}


def planned(layers: list[LayerFacts] = LAYERS, tied: list[str] | None = None, **more: Any) -> Plan:
    units: list[Unit] = [unit_of(one.name, [one.name]) for one in layers[:-1]]
    units[-1] = units[-1].model_copy(update={"tied": tied or []})
    options: dict[str, Any] = {"hosts": 4, "layout": TWO, **more}
    return pipeline_plan_and_estimate(layers, units, **options)[0]


def test_the_planner_late_multiplies_large_layers_between_pipelines_on_a_slow_network() -> None:
    plan = planned(network="100Mbit")
    assert plan.layout is not None
    assert plan.layout.sync in (
        {"fc1": "factors", "fc3": "factors"},
        {"fc1": "rows", "fc3": "rows"},
    )
    require_permitted(
        plan.layout, plan.layers, {one.id: one.batch_size for one in plan.devices}, plan.units
    )
    summed = planned(network="100Mbit", layout={**TWO, "dense": "sum"})
    assert plan.predicted is not None
    assert summed.predicted is not None
    assert plan.predicted.step_time_s.median < 0.9 * summed.predicted.step_time_s.median


def test_sums_stay_if_nothing_is_much_better() -> None:
    layers = [dense_layer(f"fc{number}", 16, 16) for number in range(4)]
    plan = planned([*layers, LOSS], network="10Gbit")
    assert plan.layout is not None
    assert plan.layout.sync == {}


def test_a_layer_that_two_stages_use_is_summed() -> None:
    plan = planned(tied=["fc1.weight"], layout={**TWO, "dense": "factors"}, network="100Mbit")
    assert plan.layout is not None
    assert plan.layout.sync == {"fc3": "factors"}


def test_a_way_that_no_layer_permits_is_refused() -> None:
    layers = [*(convolution(f"conv{number}", 2_000) for number in range(4)), LOSS]
    with pytest.raises(
        BadInput,
        match=r"train.layout.dense: got 'rows'; no layer permits it between the pipelines: conv0: ",
    ):
        planned(layers, layout={**TWO, "dense": "rows"})


def test_rows_are_held_by_speed_and_counted_in_memory() -> None:
    plan = planned(layout={**TWO, "dense": "rows"}, cores=(1.0, 1.0, 3.0, 3.0), network="1Gbit")
    summed = planned(layout={**TWO, "dense": "sum"}, cores=(1.0, 1.0, 3.0, 3.0), network="1Gbit")
    assert plan.layout is not None
    for cuts in plan.layout.rows.values():
        assert len(cuts) == 2
        assert sum(end - begin for begin, end in cuts.values()) == 2048
    needs = [sum(one.peak_memory_bytes for one in each.devices) for each in (plan, summed)]
    assert needs[0] < needs[1]


def test_the_plan_says_why_each_layer_that_pipelines_share_is_kept_equal_so() -> None:
    plan = planned(network="100Mbit")
    groups = {tuple(one.layers): one for one in plan.by_layer}
    assert set(groups) == {("conv0", "conv2"), ("fc1", "fc3")}
    convolutions, dense = groups["conv0", "conv2"], groups["fc1", "fc3"]
    assert (convolutions.sync, convolutions.why) == ("sum", "no plain product with one weight")
    assert convolutions.sent_bytes == 2 * 2_000 * 4  # of a rank of two: its gradients once
    assert plan.layout is not None
    assert dense.sync == plan.layout.how("fc1")
    assert 0 < dense.sent_bytes < 2 * 2048 * 2048 * 4
    assert dense.why.startswith("fewest bytes: 32 MiB summed, ")
    given = planned(layout={**TWO, "dense": "factors"})
    assert any(one.why.startswith("as train.layout says: ") for one in given.by_layer)


def test_layers_that_one_device_holds_are_in_no_group() -> None:
    assert planned(layout={"stages": 2, "micro_batches": 2}, hosts=2).by_layer == []
