"""The layout of each worker group: the plan's for all its devices, else one for those left.

Without stages, planning never stops the training: it has a time limit, and if it fails or takes
longer, the ranks keep the plan's layout, whose rows they divide among those that are left. Layers
that must be summed are summed in any case.

With stages, no device may take more than was planned for it: membership forms a group of some of
the devices only when their layout is known (`layout_of_some`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks import progress
from trainwright.tasks.allocate.layouts.permitted import require_permitted
from trainwright.tasks.allocate.replan.next_layout import LayoutPlanner, NextLayout
from trainwright.tasks.errors import Infeasible
from trainwright.tasks.runs.artefacts.layout import DATA_PARALLEL, Layout, Pipeline, Stage, name_of
from trainwright.tasks.train.batch.sampling import shares, split_among
from trainwright.tasks.train.launcher.moved_cuts import OTHER_SPEED
from trainwright.tasks.train.launcher.planning_thread import PlanningThread
from trainwright.tasks.train.request import TrainRequest
from trainwright.tasks.train.worker_group import WorkerGroup, needs_transfers

PLANNING_S = 1.0
"""The longest that a group without stages waits for its layout. A later answer serves the next."""
_Key = tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...], tuple[float, ...]]
"""members, their shares of the batch, layers that are summed, factors on the members' times"""


class GroupLayouts:
    """Plans the layouts of a launch's worker groups."""

    def __init__(self, request: TrainRequest, planner: LayoutPlanner | None) -> None:
        """`planner`: None in a replay or a search, which keep the plan's layouts."""
        replayed = request.replay_events is not None
        self._request, self._planner = request, None if replayed else planner
        self._planning = PlanningThread[_Key, NextLayout](self._plan, "layouts")
        self._moved: dict[tuple[int, ...], NextLayout] = {}
        """by members: layouts that measured speeds have shown to be better"""
        self._before = request.layout
        self._batch = request.plan.global_batch_size
        self._weights = [float(share) for share in request.plan.shares]
        """by device: the proportions in which ranks with whole models share the batch"""
        self._slower: Mapping[str, float] = {}
        """by id: how many times as long as estimated devices take, as far as that is measured"""
        self._group: WorkerGroup | None = None
        """the newest group, if it is planned for each member that may be lost"""

    def of(self, group: WorkerGroup) -> WorkerGroup:
        """The group with its layout, which its reason names if it changes.

        With stages, of some devices: `layout_of_some` must have said that there is one, unless the
        group only ends the training.
        """
        planned = self._request.layout
        fewer = len(group.members) < len(planned.devices)
        moved = self._moved.get(tuple(group.members)) if not group.summed else None
        if moved is not None and moved.layout is not None:
            layout, words = moved.layout, moved.words
        elif planned.has_stages and fewer:
            layout, words = self._after_stages(group)
        else:
            layout, words = self._without_stages(group)
        reason = group.reason
        if layout != self._before:
            reason = f"{reason}; layout: {words}"
        self._before = layout
        # Without stages, devices that recompute go on so.
        replanned = planned.has_stages or not planned.recomputes
        ahead = replanned and layout.name != DATA_PARALLEL and not group.end
        self._group = group if ahead else None
        self._begin_ahead()
        return group.model_copy(
            update={"layout": None if layout == planned else layout, "reason": reason}
        )

    def layout_of_some(self, members: Sequence[int]) -> Future[NextLayout]:
        """The layout of some devices of a plan with stages, as it will be when it is planned.

        The future raises Infeasible if their memory holds none, or none can be planned.
        """
        if self._planner is None:
            none: Future[NextLayout] = Future()
            none.set_exception(
                Infeasible(
                    "a stage of the pipelines is missing: only a training with an estimate of its "
                    "model plans another layout, no replay and no learning-rate search"
                )
            )
            return none
        return self._planning.need(self._staged_key(members))

    def _after_stages(self, group: WorkerGroup) -> tuple[Layout, str]:
        """The layout of some devices of a plan with stages, and its words."""
        if group.end:  # it computes no step
            layout = self._data_parallel(group)
            return layout, layout.name
        found = self.layout_of_some(group.members).result()
        assert found.layout is not None
        if not group.summed:
            return found.layout, found.words
        layout = _summed(found.layout, group.summed, self._request.plan.layers)
        return layout, layout.name

    def _without_stages(self, group: WorkerGroup) -> tuple[Layout, str]:
        """The layout of devices with the whole model, or of all devices; and its words."""
        planned = self._request.layout
        layout, words = planned, self._request.plan.layout_in_words or planned.name
        if group.summed:
            layout = _summed(planned, group.summed, self._request.plan.layers)
            words = layout.name
        fewer = len(group.members) < len(planned.devices) or group.summed
        if not fewer or planned.recomputes or planned.has_stages:
            return layout, words
        plans = self._planner is not None and not group.end
        found = self._planned(group) if plans else None
        if found is not None and found.layout is not None:
            return found.layout, found.words
        if found is not None and planned.averages and len(group.members) == 1:
            layout = _alone(layout, self._ids(group.members)[0], self._batch)
            words = f"{layout.name} on one device"
        return layout, words

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
        """Plan for each member that may be lost, so that the others need not wait then."""
        group = self._group
        if self._planner is None or group is None:
            return
        left = [[one for one in group.members if one != lost] for lost in group.members]
        keys = [
            self._staged_key(members)
            if self._request.layout.has_stages
            else self._key(group.model_copy(update={"members": members}))
            for members in left
            if members
        ]
        self._planning.plan_ahead(key for key in keys if key is not None)

    def _ids(self, members: Sequence[int]) -> list[str]:
        return [self._request.plan.devices[number].id for number in members]

    def _key(self, group: WorkerGroup) -> _Key | None:
        """What the members' layout depends on; None if their memory does not hold the batch."""
        split = split_among(self._batch, group.members, self._weights, group.limits)
        if split is None:
            return None
        batches = tuple(split[number] for number in group.members)
        return tuple(group.members), batches, tuple(group.summed), self._slower_of(group.members)

    def _staged_key(self, members: Sequence[int]) -> _Key:
        """The same if the plan has stages: shares then only say how large the batch is."""
        batches = tuple(shares(self._batch, [1] * len(members)))
        return tuple(members), batches, (), self._slower_of(members)

    def _slower_of(self, members: Sequence[int]) -> tuple[float, ...]:
        return tuple(self._slower.get(one, 1.0) for one in self._ids(members))

    def _planned(self, group: WorkerGroup) -> NextLayout | None:
        """The layout of these members; None, with a notice, if there is none in time."""
        key = self._key(group)
        if key is None:
            return None
        try:
            return self._planning.need(key).result(timeout=PLANNING_S)
        except TimeoutError:
            cause = f"planning took more than {PLANNING_S:g} s"
        except Exception as error:  # noqa: BLE001 - a boundary: the training goes on
            cause = str(error) or type(error).__name__
        message = f"no layout could be planned for the devices that are left: {cause}"
        progress.emit("notice", message=f"{message}; the plan's layout stays")
        return None

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

    def _plan(self, key: _Key) -> NextLayout:
        assert self._planner is not None
        members, batches, summed, slower = key
        if min(batches) < 1:
            raise Infeasible("fewer samples than devices")
        plan = self._request.plan
        devices = [plan.devices[number] for number in members]
        staged = self._request.layout.has_stages
        accumulation = plan.accumulation
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
