"""The checker accepts the actions of any permitted layout, and refuses what ranks can't execute.

Every rank has a list of its own, so that what is wrong with one list is wrong beside the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layout_cases import (
    LOSS,
    batches_of,
    convolution,
    dense_layer,
    holders,
    layout_of,
    models_and_layouts,
)

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.actions.action import COMPUTE, TRANSFERS, Action
from trainwright.tasks.allocate.actions.action_check import problem_of
from trainwright.tasks.allocate.actions.actions import actions_of
from trainwright.tasks.allocate.layouts.permitted import require_permitted
from trainwright.tasks.runs.artefacts.layout import Layout


@dataclass
class Case:
    """A layout's lists, one object for each rank."""

    layers: list[LayerFacts]
    layout: Layout

    def __post_init__(self) -> None:
        require_permitted(self.layout, self.layers, batches_of(self.layout))
        self.lists = [list(one) for one in actions_of(self.layout, self.layers)]
        self.trained = holders(self.layers, self.layout)

    def problem(self, rank: int | None = None, own: list[Action] | None = None) -> str | None:
        """What the checker says, after the actions of one rank have become `own`."""
        lists = list(self.lists)
        if rank is not None and own is not None:
            lists[rank] = own
        parts = max(len(one.micro_batches) for one in self.layout.pipelines)
        return problem_of(lists, self.trained, parts if self.layout.alone else 1)

    def matters(self, action: Action) -> bool:
        """Whether a rank can't leave an action out: layers without parameters have no gradient."""
        return action.kind != "weight-gradient" or action.layer in self.trained

    def is_all_of(self, action: Action) -> bool:
        """Whether a layer has no gradient outside this chunk."""
        chunks = [one.chunk for one in self.lists[0] if one.chunk and one.kind != "wait"]
        assert action.chunk is not None
        return any(sum(layer in one.layers for one in chunks) == 1 for layer in action.chunk.layers)

    def works(self, own: Sequence[Action]) -> bool:
        """Whether a rank has everything that each action needs when it comes to it."""
        before = self.lists[0]
        for started in (False, True):
            orders = [
                [one.name for one in some if one.kind in TRANSFERS and one.started == started]
                for some in (before, own)
            ]
            if orders[0] != orders[1]:
                return False
        done: set[str] = set()
        for one in own:
            if not self.needs(one) <= done:
                return False
            done.add(f"start of {one.name}" if one.started else one.name)
        return True

    def needs(self, action: Action) -> set[str]:
        """The names of the actions that come before this one on its rank."""
        layer, part, kind = action.layer, action.micro_batch, action.kind
        order = [one.name for one in self.layers]
        parts = range(max(len(one.micro_batches) for one in self.layout.pipelines))
        if kind == "wait":
            return {f"start of {action.name}"}
        if action.chunk is not None:
            what = "update" if kind == "average" else "weight gradient"
            last = parts if what != "update" or self.layout.alone else range(1)
            return {f"{what} {one} {each}" for one in action.chunk.layers for each in last}
        if kind == "agree" or not self.matters(action):
            return set()
        if kind == "gather" and action.started:
            return {f"input gradient {layer} {each}" for each in parts}
        if kind == "weight-gradient":
            late = action.name == f"weight gradient {layer}"
            return {f"factors {layer}" if late else f"input gradient {layer} {part}"}
        if kind == "update":
            if self.layout.alone:
                return {f"weight gradient {layer} {part}"}
            of_layer = [one for one in self.lists[0] if one.layer == layer and not one.started]
            made = {one.name for one in of_layer if one.kind == "weight-gradient"}
            sums = [one for one in self.lists[0] if one.kind == "wait" and one.chunk]
            return made | {one.name for one in sums if one.chunk and layer in one.chunk.layers}
        place, divided = order.index(layer), self._is_divided(layer)
        if action.name == f"outputs {layer} {part}":
            return {f"forward {layer} {part}"}
        if kind == "scatter-sum":
            return {f"input gradient {layer} {part}"}
        if kind == "forward" and divided:
            return {f"inputs {layer} {part}"}
        if kind == "input-gradient" and divided:
            return {f"output gradients {layer} {part}"}
        if kind in ("forward", "gather"):
            updated = self.layout.alone and part and layer in self.trained
            found = {f"update {layer} {part - 1}"} if updated else set()
            return found | ({self._last("forward", order[place - 1], part)} if place else set())
        if place == len(order) - 1:
            return {self._last("forward", layer, part)}
        return {self._last("input gradient", order[place + 1], part)}

    def _is_divided(self, layer: str) -> bool:
        return self.layout.how(layer) == "rows" and len(self.lists) > 1

    def _last(self, what: str, layer: str, part: int) -> str:
        """The last action of a layer in a pass."""
        ends = {"forward": "outputs", "input gradient": "input gradients"}
        divided = self._is_divided(layer)
        if what == "input gradient" and layer == next(iter(self.trained), ""):
            divided = False  # nothing before it needs a gradient
        return f"{ends[what] if divided else what} {layer} {part}"


@st.composite
def alone(draw: st.DrawFn) -> tuple[list[LayerFacts], Layout]:
    """A model and a layout whose devices train alone between averages."""
    layers = [convolution("conv", draw(st.integers(1, 900))), dense_layer("fc", 9, 7), LOSS]
    batches = [[4] * draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 4)))]
    size = draw(st.integers(100, 4000))
    return layers, layout_of(batches, average_every=3, local_batch=4, chunk_bytes=size)


def case_of(drawn: tuple[list[LayerFacts], Layout]) -> Case:
    """The case of a layout, with at most some hundreds of chunks."""
    layers, layout = drawn
    size = max(400, layout.chunk_bytes)
    return Case(layers, layout.model_copy(update={"chunk_bytes": size}))


CASES = st.one_of(models_and_layouts(), models_and_layouts(), alone()).map(case_of)


@settings(max_examples=600, deadline=None)
@given(CASES)
def test_ranks_can_execute_the_actions_of_any_permitted_layout(case: Case) -> None:
    assert len(case.lists) == len(case.layout.pipelines)
    assert case.problem() is None


@settings(max_examples=600, deadline=None)
@given(CASES, st.data())
def test_a_rank_whose_list_lacks_repeats_or_renames_an_action_is_refused(
    case: Case, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, len(case.lists) - 1))
    own = case.lists[rank]
    place = data.draw(st.sampled_from([n for n, one in enumerate(own) if case.matters(one)]))
    action, (before, after) = own[place], (own[:place], own[place + 1 :])
    for damaged in _damaged(action, len(case.lists)):
        reason = case.problem(rank, [*before, *damaged, *after])
        assert reason is not None, damaged
        assert "rank" in reason
        # Ranks may notice only at a later action that another waits there for ever.
        words = {action.name, action.layer, *(one.name for one in after if "for ever" in reason)}
        assert any(word and word in reason for word in words), reason


def _damaged(action: Action, ranks: int) -> Iterator[list[Action]]:
    """What may stand in an action's place, and must not."""
    yield []
    yield [action, action]
    if action.kind in COMPUTE:
        yield [replace(action, layer="another")]
        return
    yield [replace(action, name=f"another {action.name}")]
    for group in (action.group[1:], action.group[:-1], (*action.group, ranks)):
        yield [replace(action, group=group)]
    if action.chunk is not None:
        yield [replace(action, chunk=action.chunk._replace(elements=action.chunk.elements + 1))]


@settings(max_examples=600, deadline=None)
@given(CASES, st.data())
def test_two_actions_of_a_rank_change_places_only_if_no_other_needs_their_order(
    case: Case, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, len(case.lists) - 1))
    own = list(case.lists[rank])
    first = data.draw(st.integers(0, len(own) - 2))
    reach = data.draw(st.sampled_from([1, 3, len(own)]))
    second = data.draw(st.integers(first + 1, min(len(own) - 1, first + reach)))
    own[first], own[second] = own[second], own[first]
    assert (case.problem(rank, own) is None) == case.works(own)


@settings(max_examples=300, deadline=None)
@given(CASES, st.data())
def test_a_transfer_that_no_rank_does_is_missed(case: Case, data: st.DataObject) -> None:
    names = [
        one.name
        for one in case.lists[0]
        if one.kind in TRANSFERS and one.layer and (one.chunk is None or case.is_all_of(one))
    ]
    if names:
        name = data.draw(st.sampled_from(names))
        case.lists = [[one for one in own if one.name != name] for own in case.lists]
        assert case.problem() is not None


@settings(max_examples=300, deadline=None)
@given(CASES, st.data())
def test_two_orders_that_each_work_for_all_ranks_may_be_a_deadlock(
    case: Case, data: st.DataObject
) -> None:
    """One rank waits for a transfer that another starts only after a later one."""
    own = case.lists[0]
    assume(len(case.lists) > 1)
    started = [place for place, one in enumerate(own) if one.started]
    assume(started)
    begin = started[-1]
    end = next(n for n, one in enumerate(own) if one.kind == "wait" and one.name == own[begin].name)
    early = [*own[: begin + 1], own[end], *own[begin + 1 : end], *own[end + 1 :]]
    late = [*own[:begin], *own[begin + 1 : end], own[begin], *own[end:]]
    for alike in (early, late):
        case.lists = [list(alike) for _ in case.lists]
        assert case.problem() is None
    rank = data.draw(st.integers(0, len(case.lists) - 1))
    assert "would wait for ever at " in str(case.problem(rank, list(early)))


def test_transfers_of_other_groups_may_close_a_circle() -> None:
    one = Action("gather", "first", "fc1", 0, (0, 1))
    two = replace(one, name="second")
    assert "would meet" in str(problem_of([[one, two], [two, one]], {}))
    third = Action("gather", "with another", "fc1", 0, (0, 2))
    fourth = Action("gather", "between others", "fc1", 0, (1, 2))
    lists = [[one, third], [fourth, one], [third, fourth]]
    assert "wait for ever" in str(problem_of(lists, {}))
