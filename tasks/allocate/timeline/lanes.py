"""The bars of a rank's two lanes: what it computes or waits for, and what is on the wire.

Actions that would be too thin to see are joined with their neighbours to one bar. A stage of a
pipeline has a bar for each pass over a micro-batch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from trainwright.tasks.allocate.actions.action import COMPUTE, MESSAGES, TRANSFERS, Action
from trainwright.tasks.allocate.actions.step_simulator import SimulatedStep, Span
from trainwright.tasks.allocate.actions.transfer_sizes import TransferSizes
from trainwright.tasks.runs.artefacts.step_kinds import StepByKind
from trainwright.tasks.units import plain, size

MOST_RANKS = 16
WAIT = "wait"
BACKWARD = "backward"
"""of a stage: gradients of inputs and weights in one pass"""
WORDS: dict[str, str] = {
    "forward": "forward",
    "input-gradient": "input gradient",
    "weight-gradient": "weight gradient",
    BACKWARD: "gradients of inputs and weights",
    "recompute": "forward pass again",
    "update": "update of parameters",
    WAIT: "wait",
    "sum": "sum of gradients",
    "gather": "gather",
    "exchange": "exchange",
    "scatter-sum": "scatter-sum",
    "average": "average of parameters",
    "agree": "sum of the step's figures",
    "send": "message to another stage",
}
"""Kinds of actions, for people."""
_MOST_NAMED = 3


@dataclass(frozen=True)
class Bar:
    """Something that a rank does for a while, or several things that are joined."""

    kind: str
    begin_s: float
    end_s: float
    layers: tuple[str, ...]
    label: str
    """a short name, which may not fit; empty for joined actions"""
    title: str
    """layers, kind, begin and end"""


def shown_ranks(step: SimulatedStep) -> list[int]:
    """The ranks to show: all, or `MOST_RANKS` of them.

    The latter are evenly spread from the one that computes least to the one that computes most.
    """
    work = step.computed_s
    count = len(work)
    if count <= MOST_RANKS:
        return list(range(count))
    by_work = sorted(range(count), key=lambda rank: (work[rank], rank))
    places = [round(place * (count - 1) / (MOST_RANKS - 1)) for place in range(MOST_RANKS)]
    return sorted(by_work[place] for place in places)


def compute_lane(step: SimulatedStep, rank: int, least_s: float) -> list[Bar]:
    """What a rank computes, and when it waits. Bars shorter than `least_s` are joined."""
    spans = [one for one in step.spans(rank) if not one.action.started]
    if any(one.action.kind in MESSAGES for one in step.spans(rank)):
        return list(_joined(_passes(spans), least_s))
    return list(_joined((_bar(one, _kind(one)) for one in spans), least_s))


def transfer_lane(
    step: SimulatedStep, sizes: TransferSizes, rank: int, least_s: float
) -> list[Bar]:
    """The transfers that a rank takes part in, while they are on the wire."""
    bars: dict[str, Bar] = {}
    for one in step.spans(rank):
        action = one.action
        is_transfer = action.kind in TRANSFERS or action.kind == "send"
        if is_transfer and action.name not in bars:
            begin, end = step.on_wire[action.name]
            sent = float(sizes.of(action).sent_bytes(len(step.sent_bytes))[rank])
            bars[action.name] = _bar(Span(action, begin, end), action.kind, sent)
    ordered = sorted(bars.values(), key=lambda bar: (bar.begin_s, bar.end_s))
    return list(_joined(ordered, least_s))


def measured_lane(measured: StepByKind, least_s: float) -> list[Bar]:
    """A stage's passes in a measured step, and its waits for messages between them."""
    bars, at_s = list[Bar](), 0.0
    for one in measured.passes:
        number, when = one.micro_batch + 1, _when(one.begin_s, one.end_s)
        if one.begin_s > at_s and bars:
            title = f"measured: wait, {_when(at_s, one.begin_s)}"
            bars.append(Bar(WAIT, at_s, one.begin_s, (), "", title))
        title = f"measured: micro-batch {number}: {WORDS[one.kind]}, {when}"
        bars.append(Bar(one.kind, one.begin_s, one.end_s, (), str(number), title))
        at_s = one.end_s
    return list(_joined(bars, least_s))


def _passes(spans: Sequence[Span]) -> Iterator[Bar]:
    """A bar for each pass over a micro-batch, and for whatever else a stage does."""
    for key, some in itertools.groupby(spans, _pass_of):
        own = list(some)
        if key is None:
            yield from (_bar(one, _kind(one)) for one in own)
            continue
        kinds = dict.fromkeys(one.action.kind for one in own)
        both = {"input-gradient", "weight-gradient"} <= kinds.keys()
        kind = BACKWARD if both else next(reversed(kinds))
        begin_s, end_s = own[0].begin_s, own[-1].end_s
        layers = tuple(dict.fromkeys(one.action.layer for one in own))
        number = own[0].action.micro_batch + 1
        title = f"micro-batch {number}: {WORDS[kind]} of {_some(layers)}, {_when(begin_s, end_s)}"
        yield Bar(kind, begin_s, end_s, layers, str(number), title)


def _pass_of(span: Span) -> tuple[str, int] | None:
    """The same for all of a pass; None if it is of no pass, or late."""
    action = span.action
    if action.kind not in COMPUTE or action.kind == "update" or action.joint:
        return None
    return "forward" if action.kind == "forward" else BACKWARD, action.micro_batch


def _kind(span: Span) -> str:
    return span.action.kind if span.action.kind in COMPUTE else WAIT


def _bar(span: Span, kind: str, sent_bytes: float | None = None) -> Bar:
    action = span.action
    what = WORDS.get(kind, kind)
    if kind == WAIT:
        what = f"wait for {_transfer(action)}"
    elif sent_bytes is not None:
        what = f"{_transfer(action)}, {size(sent_bytes)} sent"
    layers = action.chunk.layers if action.chunk is not None else (action.layer,)
    layers = tuple(one for one in layers if one)
    counted = action.micro_batch and action.kind not in MESSAGES
    part = f", micro-batch {action.micro_batch + 1}" if counted else ""
    title = (
        f"{_some(layers)}{': ' if layers else ''}{what}{part}, {_when(span.begin_s, span.end_s)}"
    )
    label = layers[-1].rpartition(".")[2] if layers else ""
    return Bar(kind, span.begin_s, span.end_s, layers, label, title)


def _transfer(action: Action) -> str:
    """A transfer in words, such as `gather of factors`."""
    if action.kind in MESSAGES:
        return f"{_first_word(action)} of micro-batch {action.micro_batch + 1}"
    if action.chunk is not None or action.kind == "agree":
        return WORDS.get(_first_word(action), _first_word(action))
    what = action.name.partition(f" {action.layer}")[0]
    kind = "gather" if action.kind == WAIT else action.kind
    return f"{WORDS.get(kind, kind)} of {what}"


def _first_word(action: Action) -> str:
    return action.name.partition(" ")[0]


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _when(*seconds: float) -> str:
    begin, end = (plain(1e3 * value, 4) for value in seconds)
    return f"{begin} to {end} ms"


def _joined(bars: Iterable[Bar], least_s: float) -> Iterator[Bar]:
    """The bars, with neighbours that are shorter than `least_s` joined until they are not."""
    thin: list[Bar] = []
    for bar in bars:
        if bar.end_s <= bar.begin_s:
            continue
        if thin and (
            bar.begin_s - thin[-1].end_s > least_s or thin[-1].end_s - thin[0].begin_s >= least_s
        ):
            yield _one(thin)
            thin = []
        if bar.end_s - bar.begin_s >= least_s:
            if thin:
                yield _one(thin)
                thin = []
            yield bar
        else:
            thin.append(bar)
    if thin:
        yield _one(thin)


def _one(bars: Sequence[Bar]) -> Bar:
    """One bar for several, of the kind that takes longest."""
    if len(bars) == 1:
        return bars[0]
    seconds: Counter[str] = Counter()
    for bar in bars:
        seconds[bar.kind] += bar.end_s - bar.begin_s  # type: ignore[assignment]  # a float
    kinds = [kind for kind, _ in seconds.most_common()]
    words = ", ".join(WORDS.get(kind, kind) for kind in kinds)
    layers = tuple(dict.fromkeys(layer for bar in bars for layer in bar.layers))
    begin_s, end_s = bars[0].begin_s, max(one.end_s for one in bars)
    title = f"{_some(layers)}: {len(bars)} short actions ({words}), {_when(begin_s, end_s)}"
    return Bar(kinds[0], begin_s, end_s, layers, "", title)
