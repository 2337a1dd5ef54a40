"""What each rank does in a step: the lists of actions can be executed, whatever the layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import (
    ACTIVATION,
    LOSS,
    convolution,
    dense_layer,
    holders,
    layout_of,
)

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.actions.action import Action
from trainwright.tasks.allocate.actions.action_check import problem_of
from trainwright.tasks.allocate.actions.actions import actions_of
from trainwright.tasks.allocate.actions.chunks import chunks_of
from trainwright.tasks.allocate.layouts.permitted import require_permitted
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline

MODEL = [
    convolution("conv", 500),
    ACTIVATION,
    dense_layer("fc1", 30, 20),
    dense_layer("fc2", 20, 10),
    LOSS,
]


def names(actions: list[Action]) -> list[str]:
    return [action.name for action in actions]


@given(
    st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=3), min_size=1, max_size=8),
    st.integers(1, 40),
)
def test_chunks_hold_every_gradient_once_in_backward_order(
    sizes: list[list[int]], most: int
) -> None:
    layers = [
        LayerFacts(
            name=str(number),
            kind="any",
            parameters={f"{number}.{place}": size for place, size in enumerate(own)},
        )
        for number, own in enumerate(sizes)
    ]
    chunks = chunks_of(layers, most)
    backward = [
        (name, size) for one in reversed(layers) for name, size in reversed(one.parameters.items())
    ]
    total = sum(size for _, size in backward)
    # All chunks are full but the last.
    assert [one.elements for one in chunks] == [
        min(most, total - begin) for begin in range(0, total, most)
    ]
    numbers = [name for name, size in backward for _ in range(size)]
    for number, chunk in enumerate(chunks):
        own = numbers[number * most : (number + 1) * most]
        assert list(chunk.parameters) == list(dict.fromkeys(own))
    assert len({(chunk.parameters[0], chunk.part) for chunk in chunks}) == len(chunks)


def test_gradients_are_sent_in_the_order_of_the_backward_pass_while_it_goes_on() -> None:
    layout = layout_of([[8], [4]], {"fc1": "factors"}, chunk_bytes=4 * 210)
    actions = actions_of(layout, MODEL)[0]
    started = [action.name for action in actions if action.started]
    conv = ["sum conv.weight", "sum conv.weight part 2", "sum conv.weight part 3"]
    assert started == ["sum fc2.bias", "factors fc1", *conv]
    order = names(actions)
    assert order.index("sum fc2.bias") < order.index("input gradient fc1 0")
    # Factors are multiplied at the end, when all have come.
    assert order.index("weight gradient fc1") > order.index("weight gradient conv 0")


def test_a_sharded_layer_gathers_inputs_and_sums_input_gradients_in_every_micro_batch() -> None:
    layout = layout_of([[8, 8], [4]], {"fc1": "rows"}, {"fc1": [15, 5]})
    order = names(actions_of(layout, MODEL)[1])
    for part in (0, 1):
        steps = [
            f"inputs fc1 {part}",
            f"forward fc1 {part}",
            f"outputs fc1 {part}",
            f"output gradients fc1 {part}",
            f"input gradient fc1 {part}",
            f"input gradients fc1 {part}",
            f"weight gradient fc1 {part}",
        ]
        places = [order.index(name) for name in steps]
        assert places == sorted(places)
    assert not any("sum fc1" in name for name in order)


def test_alone_a_rank_sends_nothing() -> None:
    layout = layout_of([[8]], {"fc1": "factors", "fc2": "rows"}, {"fc2": [10]})
    actions = actions_of(layout, MODEL)[0]
    assert not any(action.group for action in actions)
    assert problem_of([actions], holders(MODEL, layout)) is None


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (
            layout_of([[1], [1]], {"conv": "factors"}),
            "conv can't be factors: Conv2d is not a plain product",
        ),
        (layout_of([[1], [1]], {"nothing": "sum"}), "got the layer 'nothing'"),
        (
            layout_of([[1], [1]], {"fc1": "rows"}, {"fc1": [10, 5]}),
            "hold 15 rows; its weight has 20",
        ),
        (layout_of([[1], [1]], {"fc1": "average"}), "average_every is not set"),
        (layout_of([[1], [1]], {"fc1": "sum"}, {"fc1": [10, 10]}), "whose sync is not rows"),
        (layout_of([[1]]), "the plan's are device-0, device-1"),
    ],
)
def test_a_layout_that_the_model_does_not_permit_is_refused(layout: Layout, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        require_permitted(layout, MODEL, {"device-0": 1, "device-1": 1})


def test_what_ranks_would_ignore_is_refused() -> None:
    both = {"device-0": 4, "device-1": 4}
    layout = layout_of([[2, 2], [4]])
    require_permitted(layout, MODEL, both)
    first, second = layout.pipelines
    (stage,), (other,) = first.stages, second.stages

    def refused(*pipelines: Pipeline) -> str:
        with pytest.raises(BadInput) as why:
            require_permitted(layout.model_copy(update={"pipelines": [*pipelines]}), MODEL, both)
        return str(why.value)

    assert refused(first.model_copy(update={"stages": [stage, other]}), second) == (
        "layout: is of the devices device-0, device-1, device-1; the plan's are device-0, device-1"
    )
    says = "layout.pipelines: device-1: the micro-batches {} have {} samples; its batch in the plan"
    for parts, samples in ([3], 3), ([5], 5), ([], 0), ([6, -2], 4):
        wrong = second.model_copy(update={"micro_batches": parts})
        assert refused(first, wrong) == f"{says.format(parts, samples)} has 4"


def test_a_shared_weight_is_not_divided() -> None:
    shared = [MODEL[2].model_copy(update={"shared": True}), LOSS]
    for sync in ("factors", "rows"):
        with pytest.raises(BadInput, match=f"fc1 can't be {sync}: another layer uses its weight"):
            require_permitted(layout_of([[1]], {"fc1": sync}), shared, {"device-0": 1})


def test_devices_that_train_alone_update_after_each_local_step() -> None:
    layout = layout_of([[8, 8, 8], [8]], average_every=4, local_batch=8)
    lists = actions_of(layout, MODEL)
    assert problem_of(lists, holders(MODEL, layout), local_steps=3) is None
    assert "updates conv 3 times" in str(problem_of(lists, holders(MODEL, layout)))
    order = names(lists[0])
    assert order.index("update fc2 0") < order.index("forward conv 1")
    assert [one.kind for one in lists[0] if one.group] == ["agree", "average"]


def test_a_mixed_layout_sums_some_layers_and_averages_others() -> None:
    layout = layout_of([[8], [4]], {"fc1": "average", "fc2": "factors"}, average_every=4)
    lists = actions_of(layout, MODEL)
    assert problem_of(lists, holders(MODEL, layout)) is None
    moved = [(one.kind, one.name) for one in lists[0] if one.group and one.kind != "wait"]
    assert moved == [
        ("gather", "factors fc2"),
        ("sum", "sum conv.weight"),
        ("agree", "agree"),
        ("average", "average fc1.bias"),
    ]
