"""The split events of a recorded run, as a replay obeys them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainwright.tasks.runs.artefacts.training_result import SplitEvent

if TYPE_CHECKING:
    from trainwright.tasks.train.checkpoint.files import CheckpointState


class RecordedEvents:
    """What a run changed before each of its steps, in order."""

    def __init__(self, events: Sequence[SplitEvent]) -> None:
        self._by_step = _by_step(events)

    def left(self, state: CheckpointState) -> list[SplitEvent]:
        """The events before the state's next step that are not among the state's own yet."""
        documents = [document_of(event) for event in self._by_step.get(state.step, [])]
        return [
            event
            for place, event in enumerate(self._by_step.get(state.step, []))
            if state.events.count(documents[place]) < documents[: place + 1].count(documents[place])
        ]


def _by_step(events: Sequence[SplitEvent]) -> dict[int, list[SplitEvent]]:
    """By step: its last event and those with an average, with the layouts of the others."""
    found: dict[int, list[SplitEvent]] = {}
    for event in events:
        before = found.setdefault(event.step, [])
        if before and before[-1].averaged is None and event.averaged is None:
            last = before.pop()
            if event.layout is None:
                event = event.model_copy(update={"layout": last.layout})
        before.append(event)
    return found


def document_of(event: SplitEvent) -> dict[str, Any]:
    """An event as JSON, as it is in a checkpoint."""
    return event.model_dump(mode="json", exclude_none=True)
