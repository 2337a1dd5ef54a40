"""What each stage of a pipeline does in a step: the lists can be executed, whatever the layout."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import LOSS, convolution, dense_layer
from stage_cases import SCHEDULES, chain, holders, stage_layout, staged_models, unit_of

from trainwright.estimator.structure import LayerFacts, Unit
from trainwright.tasks.allocate.actions.action import Action
from trainwright.tasks.allocate.actions.action_check import problem_of
from trainwright.tasks.allocate.actions.actions import actions_of
from trainwright.tasks.allocate.actions.schedules import in_flight, passes_of
from trainwright.tasks.allocate.layouts.permitted import require_permitted
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline, Stage, StageSchedule

Case = tuple[list[LayerFacts], list[Unit], Layout]


@settings(max_examples=600, deadline=None)
@given(staged_models())
def test_the_lists_of_any_permitted_layout_with_stages_can_be_executed(case: Case) -> None:
    layers, units, layout = case
    lists = actions_of(layout, layers, units)
    assert len(lists) == len(layout.devices)
    assert problem_of(lists, holders(layers, layout, units)) is None
    samples = {
        stage.device: sum(one.micro_batches) for one in layout.pipelines for stage in one.stages
    }
    require_permitted(layout, layers, samples, units)


@settings(max_examples=200, deadline=None)
@given(staged_models(), st.data())
def test_a_damaged_list_of_a_stage_is_found(case: Case, data: st.DataObject) -> None:
    layers, units, layout = case
    lists = [list(one) for one in actions_of(layout, layers, units)]
    rank = data.draw(st.integers(0, len(lists) - 1))
    important = [
        place
        for place, action in enumerate(lists[rank])
        if action.group or action.kind in ("update", "wait")
    ]
    if not important:
        return
    place = data.draw(st.sampled_from(important))
    if data.draw(st.booleans()):
        del lists[rank][place]
    else:
        lists[rank].insert(place, lists[rank][place])
    assert problem_of(lists, holders(layers, layout, units)) is not None


@settings(max_examples=200, deadline=None)
@given(staged_models())
def test_every_pass_of_every_layer_happens_once_for_each_micro_batch(case: Case) -> None:
    layers, units, layout = case
    lists = actions_of(layout, layers, units)
    for number, pipeline in enumerate(layout.pipelines):
        first = sum(len(one.stages) for one in layout.pipelines[:number])
        own = [one for each in lists[first : first + len(pipeline.stages)] for one in each]
        parts = range(len(pipeline.micro_batches))
        for kind in ("forward", "input-gradient"):
            done = Counter((one.layer, one.micro_batch) for one in own if one.kind == kind)
            assert done == Counter((layer.name, part) for layer in layers for part in parts)
        weights = Counter(
            (one.layer, one.micro_batch)
            for one in own
            if one.kind == "weight-gradient" and layout.how(one.layer) != "factors"
        )
        summed = [one.name for one in layers if layout.how(one.name) != "factors"]
        assert weights == Counter((name, part) for name in summed for part in parts)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(1, 8), st.integers(1, 12), st.data())
def test_a_stage_keeps_no_more_micro_batches_than_its_schedule_says(
    schedule: StageSchedule, stages: int, parts: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    kept, most = 0, 0
    for one_pass in passes_of(schedule, stages, stage, parts):
        kept += one_pass.kind == "forward"
        most = max(most, kept)
        kept -= one_pass.kind in ("backward", "weight-gradient")
    assert most == in_flight(schedule, stages, stage, parts)
    assert kept == 0
    done = [one_pass.kind for one_pass in passes_of(schedule, stages, stage, parts)]
    assert done.count("forward") == parts


def passes(actions: list[Action]) -> list[str]:
    """The passes of a stage that computes one layer, such as F0, B0, W0."""
    letters = {"forward": "F", "input-gradient": "B", "weight-gradient": "W"}
    return [
        f"{letters[one.kind]}{one.micro_batch}"
        for one in actions
        if one.kind in letters and one.layer != "loss"
    ]


@pytest.mark.parametrize(
    ("schedule", "first", "last"),
    [
        ("gpipe", "F0 F1 F2 B0 W0 B1 W1 B2 W2", "F0 F1 F2 B0 W0 B1 W1 B2 W2"),
        ("1f1b", "F0 F1 B0 W0 F2 B1 W1 B2 W2", "F0 B0 W0 F1 B1 W1 F2 B2 W2"),
        ("zero-bubble", "F0 F1 B0 W0 F2 B1 W1 B2 W2", "F0 B0 F1 B1 W0 F2 B2 W1 W2"),
    ],
)
def test_the_order_of_a_schedule(schedule: StageSchedule, first: str, last: str) -> None:
    layers, units = chain(2)
    layout = stage_layout(([4, 4, 3], [1]), units=units, schedule=schedule)
    lists = actions_of(layout, layers, units)
    assert [" ".join(passes(one)) for one in lists] == [first, last]


def test_a_stage_sends_what_crosses_its_cut_and_receives_gradients() -> None:
    layers, units = chain(3)
    layout = stage_layout(([4, 3], [1, 2]), units=units)
    first, middle, last = actions_of(layout, layers, units)
    message = [(one.kind, one.group, one.layer, one.micro_batch) for one in middle if one.group]
    assert message == [
        ("receive", (0, 1), "layer0", 0),
        ("send", (1, 2), "layer1", 0),
        ("receive", (0, 1), "layer0", 1),
        ("send", (1, 2), "layer1", 1),
        ("receive", (2, 1), "layer1", 0),
        ("send", (1, 0), "layer0", 0),
        ("receive", (2, 1), "layer1", 1),
        ("send", (1, 0), "layer0", 1),
        ("agree", (0, 1, 2), "", 0),
    ]
    assert not any(one.kind == "send" and one.group[1] == 0 for one in first)
    assert [one.kind for one in last if one.group][:2] == ["receive", "send"]


def test_sums_are_among_the_ranks_that_hold_a_layer_and_start_in_the_last_pass() -> None:
    layers, units = chain(4)
    layout = stage_layout(([4, 4], [2]), ([6], [3]), units=units, chunk_bytes=4000)
    lists = actions_of(layout, layers, units)
    sums = [[(one.name, one.group) for one in each if one.kind == "sum"] for each in lists]
    assert sums[0] == [("sum layer1.weight", (0, 2)), ("sum layer0.weight", (0, 2))]
    assert sums[1] == [("sum layer3.weight", (1, 3)), ("sum layer2.weight", (1, 2))]
    assert sums[2] == [
        ("sum layer2.weight", (1, 2)),
        ("sum layer1.weight", (0, 2)),
        ("sum layer0.weight", (0, 2)),
    ]
    names = [one.name for one in lists[0]]
    begun = names.index("sum layer1.weight")
    assert names[begun - 1] == "weight gradient layer1 1"
    assert begun < names.index("input gradient layer0 1")


def test_a_tied_weight_is_summed_over_all_stages_that_use_it() -> None:
    layers = [convolution("embed", 500), convolution("body", 100), LOSS]
    units = [
        unit_of("embed", ["embed"]),
        unit_of("body", ["body"]),
        unit_of("head", [], tied=["embed.weight"]),
    ]
    layout = stage_layout(([4], [1, 2]), units=units)
    lists = actions_of(layout, layers, units)
    assert problem_of(lists, holders(layers, layout, units)) is None
    sums = [[(one.name, one.group) for one in each if one.kind == "sum"] for each in lists]
    assert sums == [[("sum embed.weight", (0, 2))], [], [("sum embed.weight", (0, 2))]]
    updates = [[one.layer for one in each if one.kind == "update"] for each in lists]
    assert updates == [["embed"], ["body"], ["embed"]]


def test_a_unit_is_computed_again_before_its_backward_pass() -> None:
    layers, units = chain(2)
    layout = stage_layout(([4], [1]), units=units)
    pipeline = layout.pipelines[0]
    again = pipeline.stages[0].model_copy(update={"recompute": ["layer0"]})
    stages = [again, pipeline.stages[1]]
    layout = layout.model_copy(
        update={"pipelines": [pipeline.model_copy(update={"stages": stages})]}
    )
    names = [one.name for one in actions_of(layout, layers, units)[0]]
    assert names.index("recompute layer0 0") == names.index("input gradient layer0 0") - 1


def test_a_module_stands_for_the_units_inside_it() -> None:
    layers, units = chain(3)
    inside = [
        one.model_copy(update={"modules": [f"body.{one.name}"]}) if number else one
        for number, one in enumerate(units)
    ]
    layout = stage_layout(([4], [1]), units=inside)
    stages = layout.pipelines[0].stages
    short = [stages[0], stages[1].model_copy(update={"layers": ["body"]})]
    named = layout.model_copy(
        update={"pipelines": [layout.pipelines[0].model_copy(update={"stages": short})]}
    )
    assert actions_of(named, layers, inside) == actions_of(layout, layers, inside)
    with pytest.raises(BadInput, match="got the unit 'layer1'; allowed: a unit of the model"):
        actions_of(layout, layers, [*inside[:1], unit_of("other", ["layer2"])])
    with pytest.raises(BadInput, match="the model can't be cut into units"):
        actions_of(layout, layers)


def test_messages_that_are_lost_or_mixed_up_are_found() -> None:
    send = Action("send", "one", "unit", 0, (0, 1), started=True)
    receive = Action("receive", "one", "unit", 0, (0, 1))
    assert problem_of([[send], [receive]], {}) is None
    assert problem_of([[send], []], {}) == "rank 0 sends one, rank 1 expects nothing"
    assert problem_of([[], [receive]], {}) == "rank 0 sends nothing, rank 1 expects one"
    assert "two messages of one name" in str(problem_of([[send, send], [receive, receive]], {}))
    other, others = (
        Action(one.kind, "two", "unit", 1, (0, 1), one.started) for one in (send, receive)
    )
    assert "sends one, rank 1 expects two" in str(
        problem_of([[send, other], [others, receive]], {})
    )
    assert "is a receive of the ranks (0, 1)" in str(problem_of([[receive], []], {}))
    back, taken = (
        Action(kind, "back", "unit", 0, (1, 0), kind == "send") for kind in ("send", "receive")
    )
    assert "wait for ever" in str(problem_of([[taken, send], [receive, back]], {}))


def test_a_message_at_the_wrong_place_is_found() -> None:
    layers, units = chain(2)
    layout = stage_layout(([4], [1]), units=units)
    first, second = actions_of(layout, layers, units)
    held = holders(layers, layout, units)
    early = [first[1], first[0], *first[2:]]
    assert "sends activations of pipeline 0" in str(problem_of([early, second], held))
    late = [second[1], second[0], *second[2:]]
    assert "receives activations of pipeline 0" in str(problem_of([first, late], held))


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ([["layer0", "layer1", "layer2"], []], "the stage of device-1 has no unit of the model"),
        ([["layer0"], ["layer1"]], r"layout.pipelines\[0\]: no stage has the unit layer2"),
        ([["layer0", "layer1"], ["layer1", "layer2"]], "the unit layer1 is in two stages, of dev"),
        ([["layer0"], ["layer2"]], "the stage of device-1 begins with layer2; expected: layer1"),
        ([["layer1", "layer0"], ["other"]], "got the unit 'other'; allowed: a unit of the model"),
    ],
)
def test_stages_that_are_not_the_model_are_refused(stages: list[list[str]], says: str) -> None:
    layers, units = chain(3)
    devices = {f"device-{number}": 4 for number in range(len(stages))}
    layout = Layout(
        name="pipeline",
        pipelines=[
            Pipeline(
                micro_batches=[4],
                stages=[
                    Stage(device=device, layers=own)
                    for device, own in zip(devices, stages, strict=True)
                ],
            )
        ],
    )
    with pytest.raises(BadInput, match=says):
        require_permitted(layout, layers, devices, units)


def test_a_pipeline_that_its_devices_do_not_permit_is_refused() -> None:
    layers, units = chain(3)
    layout = stage_layout(([4, 3], [1]), ([5], [2]), units=units)
    batches = {"device-0": 7, "device-1": 7, "device-2": 5, "device-3": 5}
    require_permitted(layout, layers, batches, units)

    def refused(layout: Layout, units: list[Unit] = units, **given: int) -> str:
        with pytest.raises(BadInput) as why:
            require_permitted(layout, layers, batches | given, units)
        return str(why.value)

    assert "the micro-batches [4, 3] have 7 samples; its batch in the plan has 8" in refused(
        layout, **{"device-1": 8}
    )
    assert "the model can't be cut into units" in refused(layout, [])
    joint = [*units[:2], units[2].model_copy(update={"batch_statistics": True})]
    assert refused(layout, joint) == (
        "layout.pipelines: device-0: got 2 micro-batches; allowed: 1: layer2 normalises by "
        "statistics of the whole batch; more with batch_norm: micro-batch"
    )
    require_permitted(
        layout.model_copy(update={"batch_norm": "micro-batch"}), layers, batches, joint
    )
    rows = layout.model_copy(
        update={"pipelines": [layout.pipelines[0], layout.pipelines[0]], "sync": {}}
    )
    assert "is of the devices" in refused(rows)
    averaged = layout.model_copy(update={"sync": {"layer0": "average"}, "average_every": 4})
    assert "layer0 is averaged; with pipelines of several stages" in refused(averaged)
    many = stage_layout(([5], [1, 2, 3]), units=[*units, units[0]])
    four = {f"device-{number}": 5 for number in range(4)}
    with pytest.raises(BadInput, match="got 4 stages; the model has 3 units"):
        require_permitted(many, layers, four, units)


def test_rows_need_one_order_of_micro_batches_on_all_that_hold_them() -> None:
    layers = [dense_layer("fc0", 4, 4), dense_layer("fc1", 4, 4), dense_layer("fc2", 4, 4), LOSS]
    units = [unit_of(one.name, [one.name]) for one in layers[:3]]
    batches = {f"device-{number}": 4 for number in range(4)}

    def layout(cut: int, schedule: StageSchedule, holders: tuple[int, int]) -> Layout:
        one, other = holders
        return stage_layout(
            ([2, 2], [1]),
            ([2, 2], [cut]),
            units=units,
            schedule=schedule,
            sync={"fc1": "rows"},
            rows={"fc1": {f"device-{one}": (0, 2), f"device-{other}": (2, 4)}},
        )

    require_permitted(layout(1, "1f1b", (1, 3)), layers, batches, units)
    require_permitted(layout(2, "gpipe", (1, 2)), layers, batches, units)
    with pytest.raises(BadInput, match="fc1 can't be rows: device-1 and device-2 hold it, and do"):
        require_permitted(layout(2, "1f1b", (1, 2)), layers, batches, units)
    with pytest.raises(BadInput, match=r"layout\.rows: fc1: only device-1, device-3 compute it"):
        require_permitted(layout(1, "1f1b", (0, 3)), layers, batches, units)


def test_dense_layers_need_another_pipeline_and_one_stage_of_each() -> None:
    layers = [dense_layer("fc0", 4, 4), dense_layer("fc1", 4, 4), LOSS]
    units = [unit_of(one.name, [one.name]) for one in layers[:2]]
    tied = [units[0], units[1].model_copy(update={"tied": ["fc0.weight"]})]
    batches = {f"device-{number}": 4 for number in range(4)}
    late: dict[str, Any] = {"sync": {"fc0": "factors"}}
    two = stage_layout(([2, 2], [1]), ([2, 2], [1]), units=units, **late)
    require_permitted(two, layers, batches, units)

    def refused(layout: Layout, units: list[Unit]) -> str:
        with pytest.raises(BadInput) as why:
            require_permitted(layout, layers, layout.samples, units)
        return str(why.value)

    one = stage_layout(([2, 2], [1]), units=units, **late)
    assert refused(one, units) == "layout: fc0 can't be factors: only one pipeline holds it"
    assert refused(two, tied) == (
        "layout: fc0 can't be factors: the stage of device-1 uses its weight, and another one of "
        "its pipeline has it"
    )
    pipeline = two.pipelines[0]
    again = pipeline.stages[0].model_copy(update={"recompute": ["fc0"]})
    pipelines = [
        pipeline.model_copy(update={"stages": [again, pipeline.stages[1]]}),
        two.pipelines[1],
    ]
    assert refused(two.model_copy(update={"pipelines": pipelines}), units) == (
        "layout: fc0 can't be factors: device-0 computes it again in the backward pass, which "
        "would send again"
    )
