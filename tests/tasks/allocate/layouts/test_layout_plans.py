"""Which layout a plan gets, and what it says of the others."""

from __future__ import annotations

from typing import Any

import pytest
from layout_cases import ACTIVATION, LOSS, convolution, dense_layer
from layout_plans import HEAVY, LIGHT, batches_of, case, plan, step_s

from trainwright.tasks.allocate.layouts.permitted import overrides, require_permitted
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.train_spec import TrainSpec


def test_a_heavy_dense_layer_on_a_slow_network_is_not_summed() -> None:
    chosen, plain = plan(HEAVY), plan(HEAVY, layout="data-parallel")
    assert chosen.layout is not None
    assert chosen.layout.how("fc6") in ("factors", "rows")
    assert chosen.layout.how("conv") == "sum"
    assert chosen.strategy["name"] == chosen.layout.name == "hybrid"
    assert step_s(chosen) < step_s(plain) / 5
    require_permitted(chosen.layout, chosen.layers, batches_of(chosen))
    assert chosen.layout_in_words.startswith("conv, fc7 data parallel on 2 devices; fc6 late-mult")
    assert chosen.layout_in_words.endswith(" times fewer bytes than summed gradients")
    assert chosen.layout_rule is not None
    assert chosen.layout_rule.startswith("the best of 4 layouts by prediction")


def test_the_intervals_of_another_layout_are_ordered_and_not_negative() -> None:
    predicted = plan(HEAVY, network="10Mbit").predicted
    assert predicted is not None
    assert predicted.energy_j is not None
    for one in (predicted.step_time_s, predicted.duration_s, predicted.energy_j):
        assert 0 < one.low < one.median < one.high


def test_many_convolutions_are_counted_in_words() -> None:
    body = [convolution(f"conv{number}", 500) for number in range(6)]
    words = plan([*body, *HEAVY[1:]], layout="late-multiply").layout_in_words
    assert words.startswith("6 convolutions data parallel on 2 devices; fc6, fc7 late-multiply: ")


def test_other_layouts_are_alternatives_with_why_they_lost() -> None:
    others = [one for one in plan(HEAVY).alternatives if one.layout_in_words]
    words = [one.layout_in_words.partition(":")[0] for one in others]
    assert "all layers data parallel on 2 devices" in words
    assert "conv data parallel on 2 devices; fc6, fc7 late-multiply" in words
    assert "conv data parallel on 2 devices; fc6, fc7 sharded by rows" in words
    assert len(set(words)) == len(words) == 3
    for one in others:
        assert one.reason.startswith("a step takes ")
        assert one.predicted is not None


def test_each_layer_is_in_one_group_with_the_reason_for_its_sync() -> None:
    chosen = plan(HEAVY)
    groups = {tuple(one.layers): one for one in chosen.by_layer}
    assert set(groups) == {("conv",), ("fc6",), ("fc7",)}
    assert groups[("conv",)].why == "no plain product with one weight"
    assert (groups[("fc6",)].sync, groups[("fc7",)].sync) == ("factors", "sum")
    # 32 rows of 4096 + 4096 floats to the other device; 2 (n - 1) / n of the gradients
    assert groups[("fc6",)].sent_bytes == 32 * 8192 * 4
    assert groups[("fc7",)].sent_bytes == 4 * (4096 * 10 + 10)
    assert groups[("fc6",)].why == "fewest bytes: 64 MiB summed, 1 MiB as factors, 1.5 MiB by rows"
    given = {one.layers[0]: one.why for one in plan(HEAVY, layout="sharded").by_layer}
    assert given["fc6"].startswith("as train.layout says: 64 MiB summed, ")


def test_averaged_layers_are_one_group() -> None:
    wanted = {"name": "averaging", "average_every": 8, "outer": "nesterov"}
    (group,) = plan(HEAVY, layout=wanted).by_layer
    assert group.layers == ["conv", "fc6", "fc7"]
    assert group.why == (
        "as train.layout says: devices train alone, and average every 8 steps, then take an "
        "outer Nesterov step"
    )


@pytest.mark.parametrize("every", [None, 8, 32, 1_000_000_000])
@pytest.mark.parametrize("name", ["averaging", "mixed"])
def test_all_figures_of_a_plan_count_averages_at_epochs_and_checkpoints(
    name: str, every: int | None
) -> None:
    planned = plan(HEAVY, layout={"name": name, "average_every": every})
    assert planned.predicted is not None
    sent = max(sum(one.sent_bytes.values()) for one in planned.predicted.by_kind)
    figures = 1024  # of each step, beside the layers
    assert sum(one.sent_bytes for one in planned.by_layer) == pytest.approx(sent - figures)


@pytest.mark.parametrize(
    ("every", "checkpoint", "often"),
    [
        (8, 1000, "every 8 steps"),
        (16, 1000, "every 16 steps"),
        (32, 1000, "every 16 steps (at the end of each epoch, before the 32 of average_every)"),
        (32, 5, "every 5 steps (at each checkpoint, before the 32 of average_every)"),
        (32, 1, "after each step (at each checkpoint, before the 32 of average_every)"),
    ],
)
def test_a_plan_says_what_averages_earlier_than_its_interval(
    every: int, checkpoint: int, often: str
) -> None:
    wanted = {"name": "averaging", "average_every": every}
    planned = plan(HEAVY, layout=wanted, checkpoint={"every_steps": checkpoint})
    assert planned.layout_in_words.startswith(f"all layers averaged {often} on 2 devices")
    assert planned.by_layer[0].why.endswith(f"and average {often}")


def test_a_plan_says_why_other_layouts_were_not_compared() -> None:
    alone = plan(HEAVY, hosts=65, global_batch_size=650)
    assert (alone.layout_rule, alone.by_layer) == ("others are compared for at most 64 devices", [])
    given = plan(LIGHT, layout="data-parallel")
    assert given.layout_rule == "as train.layout says"
    averaged = plan(HEAVY, hosts=65, global_batch_size=650, layout="averaging")
    assert averaged.layout_rule == (
        "as train.layout says; compared with data parallel only: others are compared for at most "
        "64 devices"
    )
    only = plan([convolution("conv", 500), LOSS])
    assert only.layout_rule == (
        "the only layout that the model permits; no layer permits late-multiply or sharded: "
        "conv: Conv2d is not a plain product with one weight"
    )
    enough = "none of the 2 others is better by more than 5 %"
    assert plan(LIGHT).layout_rule == enough


def test_a_faster_layout_that_the_job_did_not_want_says_so() -> None:
    others = {one.layout: one for one in plan(HEAVY, layout="data-parallel").alternatives}
    assert others["hybrid"].reason.endswith("; train.layout chose another")
    assert others["hybrid"].predicted is not None


def test_a_mapping_that_fixes_no_layer_leaves_the_choice_to_the_planner() -> None:
    assert plan(LIGHT, layout={"chunk_bytes": 65536}).layout_in_words.startswith("all layers data")
    chosen = plan(HEAVY, layout={"chunk_bytes": 65536})
    assert chosen.layout is not None
    assert (chosen.layout.name, chosen.layout.chunk_bytes) == ("hybrid", 65536)


def test_many_devices_stay_data_parallel_unless_the_job_says_otherwise() -> None:
    chosen = plan(HEAVY, hosts=65, global_batch_size=650)
    assert chosen.layout is not None
    assert (chosen.layout.name, len(chosen.layout.pipelines)) == ("data-parallel", 65)
    assert all(one.layout == "data-parallel" for one in chosen.alternatives)


def test_a_light_dense_layer_stays_data_parallel() -> None:
    chosen = plan(LIGHT)
    assert chosen.layout is not None
    assert chosen.layout.name == "data-parallel"
    assert chosen.layout_in_words == "all layers data parallel on 2 devices"


def test_a_data_parallel_plan_says_in_which_order_gradients_are_made() -> None:
    model = [layer for number in range(200) for layer in (convolution(f"c{number}", 9), ACTIVATION)]
    chosen = plan([*model, LOSS], layout="data-parallel")
    assert [list(one.parameters) for one in chosen.layers] == [
        [f"c{number}.weight"] for number in range(200)
    ]
    stored = chosen.model_dump_json(exclude={"layers"})
    assert len(chosen.model_dump_json()) - len(stored) < 200 * 400
    assert Plan.model_validate_json(stored).layers == []  # a plan of before
    assert plan(LIGHT, layout="data-parallel", hosts=1).layers == []


@pytest.mark.parametrize(
    ("wanted", "name", "ways"),
    [
        ("late-multiply", "hybrid", {"fc6": "factors", "fc7": "factors", "conv": "sum"}),
        ("sharded", "hybrid", {"fc6": "rows", "fc7": "rows", "conv": "sum"}),
        ({"dense": "factors"}, "hybrid", {"fc6": "factors", "conv": "sum"}),
        ({"dense": "sum", "chunk_bytes": 65536}, "data-parallel", {"fc6": "sum"}),
    ],
)
def test_the_job_chooses_a_layout(wanted: Any, name: str, ways: dict[str, str]) -> None:
    chosen = plan(HEAVY, layout=wanted).layout
    assert chosen is not None
    assert chosen.name == name
    assert {layer: chosen.how(layer) for layer in ways} == ways


def test_the_jobs_sizes_are_in_the_layout() -> None:
    wanted = {"dense": "factors", "chunk_bytes": 65536, "factor_type": "bf16"}
    chosen = plan(HEAVY, layout=wanted).layout
    assert chosen is not None
    assert (chosen.chunk_bytes, chosen.factor_type) == (65536, "bf16")


def test_rows_follow_the_devices_speeds_and_are_all_held() -> None:
    chosen = plan(HEAVY, hosts=3, layout="sharded").layout
    assert chosen is not None
    cuts = list(chosen.rows["fc6"].values())
    assert [begin for begin, _ in cuts] == [0, *(end for _, end in cuts[:-1])]
    assert cuts[-1][1] == 4096
    assert max(end - begin for begin, end in cuts) - min(end - begin for begin, end in cuts) <= 1


def test_a_layout_that_no_layer_permits_is_refused_with_the_reason() -> None:
    only = [convolution("conv", 500), LOSS]
    with pytest.raises(BadInput, match="got 'late-multiply'; no layer permits it: conv: Conv2d is"):
        plan(only, layout="late-multiply")
    with pytest.raises(
        BadInput, match=r"train.layout.dense: got 'rows'; no layer permits it: conv"
    ):
        plan(only, layout={"dense": "rows"})


def test_a_layout_between_devices_needs_several_and_known_layers() -> None:
    with pytest.raises(BadInput, match=r"got .sharded.; the plan has one device; set devices"):
        plan(HEAVY, hosts=1, layout="sharded")
    with pytest.raises(BadInput, match=r"train.layout.dense: got 'rows'; the plan has one device"):
        plan(HEAVY, hosts=1, layout={"dense": "rows"})
    with pytest.raises(BadInput, match="got 'sharded'; the estimate does not say what each layer"):
        plan([], layout="sharded")


def test_averaging_is_chosen_only_if_the_job_says_so() -> None:
    wanted, free = plan(HEAVY, layout="averaging"), plan(HEAVY)
    assert free.layout is not None
    assert free.layout.average_every is None
    assert not {"averaging", "mixed"} & {one.layout for one in free.alternatives}
    layout = wanted.layout
    assert layout is not None
    assert (layout.name, layout.sync, layout.alone) == ("averaging", {}, True)
    assert wanted.strategy["name"] == "averaging"
    assert wanted.layout_in_words.startswith("all layers averaged every 16 steps on 2 devices: ")
    assert step_s(wanted) < step_s(plan(HEAVY, layout="data-parallel")) / 5
    reasons = {one.layout: one.reason for one in wanted.alternatives}
    assert reasons["hybrid"].endswith("; train.layout chose another")
    require_permitted(layout, wanted.layers, batches_of(wanted))


def test_mixed_averages_the_layers_with_nearly_all_parameters() -> None:
    chosen = plan(HEAVY, layout="mixed").layout
    assert chosen is not None
    assert (chosen.name, chosen.sync, chosen.alone) == ("mixed", {"fc6": "average"}, False)
    assert chosen.how("conv") == "sum"
    dense = plan(HEAVY, layout={"name": "mixed", "dense": "factors"}).layout
    assert dense is not None
    assert dense.sync == {"fc6": "average", "fc7": "factors"}
    light = plan(LIGHT, layout="mixed").layout
    assert light is not None
    assert light.how("conv") == "average"


def test_mixed_needs_two_layers() -> None:
    with pytest.raises(BadInput, match="got 'mixed'; the model has no two layers with parameters"):
        plan([dense_layer("fc", 100, 100), LOSS], layout="mixed")
    with pytest.raises(BadInput, match="got 'averaging'; the plan has one device"):
        plan(HEAVY, hosts=1, layout={"average_every": 8})


WITH_BF16 = {"dense": "factors", "factor_type": "bf16"}
AVERAGING = {"average_every": 8, "outer": "nesterov"}


def test_a_part_of_a_layout_that_changes_nothing_is_refused() -> None:
    only = [convolution("conv", 5_000), dense_layer("fc", 4096, 4096), LOSS]
    with pytest.raises(BadInput, match=r"train.layout.dense: got 'rows'; allowed: auto or sum: "):
        plan(only, layout={"name": "mixed", "dense": "rows"})
    with pytest.raises(BadInput, match=r"train.layout.local_batch: got 33; allowed: 1 to 32, "):
        plan(HEAVY, layout={"local_batch": 33})
    assert plan(HEAVY, layout={"local_batch": 32}).layout is not None
    # More devices of a training that continues have smaller parts.
    again = make_plan(*case(HEAVY, layout={"local_batch": 33}), continues=True).layout
    assert again is not None
    assert again.local_batch == 33


@pytest.mark.parametrize(
    "wanted",
    [
        "late-multiply",
        "sharded",
        "averaging",
        "mixed",
        "data-parallel",
        WITH_BF16,
        AVERAGING,
    ],
)
def test_a_plan_overrides_any_other_layout_of_a_job_than_its_own(wanted: Any) -> None:
    job, pool, estimate, data = case(HEAVY, layout=wanted)
    layout = make_plan(job, pool, estimate, data).layout
    assert not overrides(layout, job.train)
    for other in ("late-multiply", "data-parallel", "averaging", "mixed", "pipeline"):
        alike = (other, wanted) in [("late-multiply", WITH_BF16), ("averaging", AVERAGING)]
        asked = TrainSpec.model_validate({"layout": other})
        assert overrides(layout, asked) == (other != wanted and not alike)
    assert overrides(layout, TrainSpec.model_validate({"layout": {"average_every": 9}}))
    assert not overrides(layout, TrainSpec())


def test_the_jobs_interval_local_batch_and_outer_step_are_in_the_layout() -> None:
    wanted = {"average_every": 64, "local_batch": 8, "outer": "nesterov"}
    planned = plan(HEAVY, layout=wanted)
    chosen = planned.layout
    assert chosen is not None
    assert (chosen.average_every, chosen.local_batch, chosen.outer) == (64, 8, "nesterov")
    assert [one.micro_batches for one in chosen.pipelines] == [[8] * 4, [8] * 4]
    assert "in local steps of about 8 samples" in planned.layout_in_words
    mixed = plan(HEAVY, layout={"name": "mixed", "average_every": 32, "outer": "block-momentum"})
    assert mixed.layout is not None
    assert (mixed.layout.average_every, mixed.layout.outer) == (32, "block-momentum")


def test_unlike_processors_get_copies_of_late_multiplied_layers_again() -> None:
    apart = plan(HEAVY, layout="late-multiply").layout
    assert apart is not None
    assert apart.resend_every is not None
    assert apart.resend_every >= 100
    sharded = plan(HEAVY, layout="sharded").layout
    assert sharded is not None
    assert sharded.resend_every is None
