"""The layout of each worker group: the plan's for all its devices, else one for those left.

Planning must never stop the training: it has a time limit, and if it fails or takes longer, the
ranks keep the plan's layout, whose rows they divide among those that are left. Layers that must be
summed are summed in any case.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks import progress
from trainwright.tasks.allocate.layouts.permitted import require_permitted
from trainwright.tasks.allocate.replan import LayoutPlanner, NextLayout
from trainwright.tasks.runs.artefacts.layout import DATA_PARALLEL, Layout, Pipeline, Stage, name_of
from trainwright.tasks.train.batch.sampling import shares, split_among
from trainwright.tasks.train.launcher.moved_cuts import OTHER_SPEED
from trainwright.tasks.train.request import TrainRequest
from trainwright.tasks.train.worker_group import WorkerGroup, needs_transfers

PLANNING_S, STAGES_PLANNING_S = 1.0, 5.0
"""The longest that a group waits for its layout. A later answer serves the next group.

Longer after pipelines: without a plan, each device takes the whole model, which may not fit.
"""
_Key = tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...], tuple[float, ...]]
"""members, their shares of the batch, layers that are summed, factors on the members' times"""


class GroupLayouts:
    """Plans the layouts of a launch's worker groups."""

    def __init__(self, request: TrainRequest, planner: LayoutPlanner | None) -> None:
        """`planner`: None in a replay or a search, which keep the plan's layouts."""
        replayed = request.replay_events is not None
        self._request, self._planner = request, None if replayed else planner
        self._found: dict[_Key, NextLayout] = {}
        self._moved: dict[tuple[int, ...], NextLayout] = {}
        """by members: layouts that measured speeds have shown to be better"""
        self._before = request.layout
        self._ahead = threading.Thread()
        self._batch = request.plan.global_batch_size
        self._weights = [float(share) for share in request.plan.shares]
        """by device: the proportions in which ranks with whole models share the batch"""
        self._slower: Mapping[str, float] = {}
        """by id: how many times as long as estimated devices take, as far as that is measured"""
        self._group: WorkerGroup | None = None
        """the newest group, if it is planned for each member that may be lost"""

    def of(self, group: WorkerGroup) -> WorkerGroup:
        """The group with its layout, which its reason names if it changes."""
        planned = self._request.layout
        layout, words = planned, self._request.plan.layout_in_words or planned.name
        if group.summed:
            layout = _summed(planned, group.summed, self._request.plan.layers)
            words = layout.name
        fewer = len(group.members) < len(planned.devices) or group.summed
        # Without stages, devices that recompute go on so.
        replanned = planned.has_stages or not planned.recomputes
        moved = self._moved.get(tuple(group.members)) if not group.summed else None
        if moved is not None and moved.layout is not None:
            layout, words = moved.layout, moved.words
        elif fewer and replanned:
            plans = self._planner is not None and not group.end
            found = self._planned(group) if plans else None
            if found is not None and found.layout is not None:
                layout, words = found.layout, found.words
            elif found is not None and planned.averages and len(group.members) == 1:
                layout = _alone(layout, self._ids(group.members)[0], self._batch)
                words = f"{layout.name} on one device"
            elif planned.has_stages and len(group.members) < len(planned.devices):
                layout = self._data_parallel(group)
                words = layout.name
        reason = group.reason
        if layout != self._before:
            reason = f"{reason}; layout: {words}"
        self._before = layout
        ahead = replanned and layout.name != DATA_PARALLEL and not group.end
        self._group = group if ahead else None
        self._begin_ahead()
        return group.model_copy(
            update={"layout": None if layout == planned else layout, "reason": reason}
        )

    def follow(self, batch: int) -> None:
        """The global batch has this size from now on: layouts are planned for it."""
        if batch != self._batch:
            self._batch = batch
            self._begin_ahead()

    def weigh(self, weights: Sequence[float]) -> None:
        """By device: ranks share the batch in these proportions from now on, by their speeds."""
        if self._request.layout.has_stages:
            return  # its shares are not those of whole models
        self._weights = [*weights]
        ids = [device.id for device in self._request.plan.devices]
        pairs = zip(ids, self._request.plan.shares, weights, strict=True)
        self._slower = {one: share / weight for one, share, weight in pairs if share and weight}
        self._begin_ahead()

    def measure(self, slower: Mapping[str, float]) -> None:
        """By id: how many times as long as estimated stages take. Small changes don't count."""
        before = self._slower
        if any(
            abs(one / before.get(device, 1.0) - 1) > OTHER_SPEED for device, one in slower.items()
        ):
            self._slower = {**slower}
            self._begin_ahead()

    @property
    def current(self) -> Layout:
        """That of the newest group."""
        return self._before

    def move(self, members: Sequence[int], layout: NextLayout) -> None:
        """The next groups of exactly these members get this layout."""
        self._moved[tuple(members)] = layout

    def need_transfers(self, group: WorkerGroup) -> bool:
        """Whether the members connect for messages."""
        replayed = [one.layout for one in self._request.replay_events or []]
        layouts = [self._request.plan.layout, group.layout, *replayed]
        return needs_transfers(layouts, self._request.plan.devices)

    def _begin_ahead(self) -> None:
        """Plan ahead in a thread, if other layouts than data parallel are planned."""
        if self._planner is None or self._group is None or self._ahead.is_alive():
            return
        self._ahead = threading.Thread(
            target=self._plan_ahead, args=(self._group,), name="layouts ahead", daemon=True
        )
        self._ahead.start()

    def _plan_ahead(self, group: WorkerGroup) -> None:
        """Plan for each member that may be lost, so that the others need not wait then."""
        for lost in group.members:
            left = [number for number in group.members if number != lost]
            key = self._key(group.model_copy(update={"members": left})) if left else None
            if key is None or key in self._found:
                continue
            try:
                self._found[key] = self._plan(*key)
            except Exception:  # noqa: BLE001 - raised again, and reported, if it is needed
                continue

    def _ids(self, members: Sequence[int]) -> list[str]:
        return [self._request.plan.devices[number].id for number in members]

    def _key(self, group: WorkerGroup) -> _Key | None:
        """What the members' layout depends on; None if their memory does not hold the batch."""
        # What stages compute does not say how fast their devices are.
        weights = [1.0 if self._request.layout.has_stages else one for one in self._weights]
        split = split_among(self._batch, group.members, weights, group.limits)
        if split is None:
            return None
        batches = tuple(split[number] for number in group.members)
        slower = tuple(self._slower.get(one, 1.0) for one in self._ids(group.members))
        return tuple(group.members), batches, tuple(group.summed), slower

    def _planned(self, group: WorkerGroup) -> NextLayout | None:
        """The layout of these members; None, with a notice, if there is none in time."""
        key = self._key(group)
        if key is None:
            return None
        if key not in self._found:
            try:
                self._within_time(key)
            except Exception as error:  # noqa: BLE001 - a boundary: the training goes on
                cause = str(error) or type(error).__name__
                message = f"no layout could be planned for the devices that are left: {cause}"
                staged = self._request.layout.has_stages
                then = "each takes the whole model" if staged else "the plan's layout stays"
                progress.emit("notice", message=f"{message}; {then}")
        return self._found.get(key)

    def _data_parallel(self, group: WorkerGroup) -> Layout:
        """Each member with the whole model and an equal share: the last resort of a pipeline."""
        devices = self._ids(group.members)
        sizes = split_among(
            self._request.plan.global_batch_size, range(len(devices)), [1] * len(devices)
        )
        return Layout(
            pipelines=[
                Pipeline(micro_batches=[size], stages=[Stage(device=one, layers=[])])
                for one, size in zip(devices, sizes or [], strict=True)
            ]
        )

    def _within_time(self, key: _Key) -> None:
        """Plan in a thread. Raises its error, or TimeoutError."""
        ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def work() -> None:
            try:
                self._found[key] = self._plan(*key)
                ended.put(None)
            except Exception as error:  # noqa: BLE001 - raised in the other thread
                ended.put(error)

        threading.Thread(target=work, name="layout", daemon=True).start()
        patience_s = STAGES_PLANNING_S if self._request.layout.has_stages else PLANNING_S
        try:
            error = ended.get(timeout=patience_s)
        except queue.Empty:
            raise TimeoutError(f"planning took more than {patience_s:g} s") from None
        if error is not None:
            raise error

    def _plan(
        self,
        members: Sequence[int],
        batches: Sequence[int],
        summed: Sequence[str],
        slower: Sequence[float],
    ) -> NextLayout:
        assert self._planner is not None
        if min(batches) < 1:
            raise ValueError("fewer samples than devices")
        plan = self._request.plan
        devices = [plan.devices[number] for number in members]
        staged = self._request.layout.has_stages
        accumulation = 1 if staged else plan.accumulation
        by_id = dict(zip(self._ids(members), slower, strict=True))
        found = self._planner(devices, batches, accumulation, summed, staged, by_id)
        if found.layout is not None:
            layers = self._request.layers_in(found.layout)
            require_permitted(found.layout, layers, found.layout.samples, plan.units)
        return found


def _alone(layout: Layout, device: str, batch: int) -> Layout:
    """The layout on one device, which does the whole batch in local steps of the same size."""
    mine = next(one for one in layout.pipelines if one.stages[0].device == device)
    rows = {
        name: {device: (0, max(end for _, end in cuts.values()))}
        for name, cuts in layout.rows.items()
    }
    local = layout.local_batch
    parts = len(mine.micro_batches) if local is None else max(1, round(batch / local))
    pipeline = mine.model_copy(update={"micro_batches": shares(batch, [1] * parts)})
    return layout.model_copy(update={"pipelines": [pipeline], "rows": rows})


def _summed(layout: Layout, summed: Sequence[str], layers: Sequence[LayerFacts]) -> Layout:
    """The layout with some layers summed that were late-multiplied or sharded."""
    # An averaged layer has no joint work. Without its word, `how` would average all others too.
    sync = {
        name: how for name, how in layout.sync.items() if how == "average" or name not in summed
    }
    rows = {name: cuts for name, cuts in layout.rows.items() if name not in summed}
    found = layout.model_copy(update={"sync": sync, "rows": rows})
    syncs = {found.how(one.name) for one in layers if one.parameters}
    name = name_of(syncs, 1 + layout.has_stages) if syncs else layout.name
    return found.model_copy(update={"name": name})
