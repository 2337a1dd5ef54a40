"""How runs get devices: waiting, timeouts, deferral, preemption; with a real ledger."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import doors
import pytest
from finished_run import finished_training
from layout_plans import HEAVY, plan_and_estimate
from train.training_case import planned

from trainwright.operators.triggers import DevicesTrigger
from trainwright.tasks import progress
from trainwright.tasks.allocate import acquire, step
from trainwright.tasks.context import RunContext
from trainwright.tasks.errors import Infeasible, Interrupted, MustWait, RunHeld
from trainwright.tasks.leases.ledger import Holder, Ledger
from trainwright.tasks.leases.queue import Queue
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Device

PLAN = planned([{"type": "cpu", "cores": 1.0}], [8])


def make(folder: Path, name: str, **fields: Any) -> RunContext:
    job = Job.model_validate({"name": name, "data": {"uri": "builtin:digits"}, **fields})
    run = doors.open_for(job, Holder(name), store=(folder / "store").as_uri())
    run.write(PLAN)
    return doors.attach(run)


def held() -> dict[str, str]:
    return {lease.resource: lease.run for lease in doors.ledger().held("device ")}


def test_a_run_waits_until_the_devices_are_released(home: Path, tmp_path: Path) -> None:
    first, second = make(tmp_path, "first"), make(tmp_path, "second")
    acquire.lease(first, PLAN)
    found: list[tuple[Plan, int]] = []
    waiter = threading.Thread(target=lambda: found.append(acquire.lease(second, PLAN)))
    waiter.start()
    while not Queue(doors.ledger()).waiting():
        assert waiter.is_alive()
    assert held() == dict.fromkeys(PLAN.resources(""), first.run.uri)
    doors.ledger().release(first.run.uri)
    waiter.join(timeout=30)
    assert found[0][0] == PLAN
    assert held() == dict.fromkeys(PLAN.resources(""), second.run.uri)


def test_runs_on_a_pool_of_slurm_do_not_wait_for_each_other_here(
    home: Path, tmp_path: Path
) -> None:
    plan = planned([{"type": "cpu", "cores": 1.0, "engine": "slurm", "address": "a"}], [8])
    first, second = make(tmp_path, "first"), make(tmp_path, "second", queue_timeout="0s")
    (_, earlier), (_, later) = acquire.lease(first, plan), acquire.lease(second, plan)
    assert later > earlier  # both have the right to train, and a fencing token
    assert sorted(held().values()) == sorted([first.run.uri, second.run.uri])


def test_a_queue_timeout_names_place_and_holder_and_leaves_the_queue(
    home: Path, tmp_path: Path
) -> None:
    first, second = make(tmp_path, "first"), make(tmp_path, "second", queue_timeout="0s")
    acquire.lease(first, PLAN)
    with pytest.raises(
        RunHeld, match=r"queue_timeout .0 s.; place 1 of 1; .* is held by first for"
    ) as caught:
        acquire.lease(second, PLAN)
    assert caught.value.exit_code == 1
    assert Queue(doors.ledger()).waiting() == []


def test_a_stopped_waiter_leaves_the_queue(home: Path, tmp_path: Path) -> None:
    first, second = make(tmp_path, "first"), make(tmp_path, "second")
    acquire.lease(first, PLAN)
    second.stop.set()
    with pytest.raises(Interrupted):
        acquire.lease(second, PLAN)
    assert Queue(doors.ledger()).waiting() == []


def test_a_run_plans_with_the_free_devices_and_an_infeasible_one_does_not_wait(
    home: Path, tmp_path: Path
) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text("{name: p, hosts: [{name: here, devices: [{type: cpu, count: 3}]}]}")
    run = make(tmp_path, "planner", pool=str(pool))
    seen: list[list[str]] = []

    def choose(devices: list[Device]) -> Plan:
        seen.append([device.id for device in devices])
        return planned([device.model_dump() for device in devices], [8] * len(devices))

    Queue(doors.ledger()).take("other", Holder("other"), ["device localhost here/cpu-1"])
    plan, _ = acquire.lease(run, choose)
    assert [device.id for device in plan.devices] == seen[-1] == ["here/cpu-0", "here/cpu-2"]

    def infeasible(devices: list[Device]) -> Plan:
        raise Infeasible("no plan", binding="deadline")

    with pytest.raises(Infeasible):
        acquire.lease(make(tmp_path, "other", pool=str(pool)), infeasible)
    assert Queue(doors.ledger()).waiting() == []


def test_the_trigger_keeps_the_place_in_the_queue_and_fires_at_the_runs_turn(
    home: Path, tmp_path: Path
) -> None:
    first, second = make(tmp_path, "first"), make(tmp_path, "second")
    acquire.lease(first, PLAN)
    second.defers = True
    with pytest.raises(MustWait, match="place 1 of 1"):
        acquire.lease(second, PLAN)
    assert not acquire.look(second)
    path, values = DevicesTrigger(second.run.uri, "second", look_every_s=0.05).serialize()
    assert path == f"{DevicesTrigger.__module__}.{DevicesTrigger.__qualname__}"

    async def wait() -> Any:
        pending = asyncio.ensure_future(anext(DevicesTrigger(**values).run()))
        await asyncio.sleep(0.5)
        assert not pending.done()
        doors.ledger().release(first.run.uri)
        return await asyncio.wait_for(pending, 30)

    assert asyncio.run(wait()).payload == {"run": second.run.uri}
    assert acquire.lease(second, PLAN)[0] == PLAN


def test_a_step_that_defers_reports_its_place_and_keeps_its_hold(
    home: Path, tmp_path: Path
) -> None:
    first, second = make(tmp_path, "first"), make(tmp_path, "second")
    acquire.lease(first, PLAN)
    second.defers = True
    events: list[dict[str, Any]] = []
    with progress.listening(events.append), pytest.raises(MustWait):
        doors.run_work(second, lambda context: acquire.lease(context, PLAN))
    (queued,) = [event for event in events if event["event"] == "queue"]
    assert queued["run"] == second.run.uri
    assert queued["place"] == 1
    assert second.run.status().state == "running"
    assert second.run.uri in {lease.run for lease in doors.ledger().held()}


def test_a_killed_deferred_task_leaves_the_queue_and_releases_the_run(
    home: Path, tmp_path: Path
) -> None:
    first, second = make(tmp_path, "first"), make(tmp_path, "second")
    acquire.lease(first, PLAN)
    second.defers = True
    with pytest.raises(MustWait):
        acquire.lease(second, PLAN)
    asyncio.run(DevicesTrigger(second.run.uri, "second").on_kill())
    assert Queue(doors.ledger()).waiting() == []
    assert second.run.status().state == "interrupted"
    assert second.run.uri not in {lease.run for lease in doors.ledger().held()}


class LateLedger(Ledger):
    """The ledger of a process that sleeps past the expiry of its lease on devices."""

    def renew(self, run: str, resources: Iterable[str], *more: float, **lease: Any) -> bool:
        """Renew, if a heartbeat renews devices, only after their lease has ended."""
        resources = list(resources)
        if lease.get("token") is not None:
            self.release(run, resources, token=lease["token"])
        return super().renew(run, resources, *more, **lease)


def test_work_does_not_start_under_a_lost_lease(home: Path, tmp_path: Path) -> None:
    run = make(tmp_path, "slow")
    acquire.lease(run, PLAN)
    assert doors.ledger().ask_to_replan(run.run.uri, PLAN.resources("")) == len(PLAN.resources(""))
    run.ledger = LateLedger(run.settings.ledger_url)
    other = PLAN.model_copy(update={"epochs": PLAN.epochs + 1})
    made: list[Plan] = []

    def again(devices: list[Device]) -> Plan:
        made.append(other)
        return other

    with pytest.raises(RunHeld, match="was lost before the work started"):
        acquire.on_devices(
            run, lambda halt, claim: pytest.fail("it worked"), "the work", again=again
        )
    assert made == [other]
    assert run.run.read(Plan) == PLAN


def test_a_preempted_run_saves_releases_its_devices_and_continues_later(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acquire, "TTL_S", 6.0)
    low, high = make(tmp_path, "low"), make(tmp_path, "high", priority=5)
    events: list[str] = []
    began = threading.Event()

    def work(halt: threading.Event, still_mine: Callable[[], bool]) -> str:
        assert still_mine()
        events.append("low works")
        began.set()
        if len(events) > 1:
            return "done"
        assert halt.wait(timeout=30)
        raise Interrupted("stopped after step 7; its checkpoint is kept")

    results: list[str] = []
    thread = threading.Thread(
        target=lambda: results.append(acquire.on_devices(low, work, "the work"))
    )
    thread.start()
    assert began.wait(timeout=30)
    _, token = acquire.lease(high, PLAN)
    events.append("high has them")
    assert low.run.status().state == "interrupted"
    assert high.run.uri in (low.run.status().error or {})["message"]
    doors.ledger().release(high.run.uri, PLAN.resources(""), token=token)
    thread.join(timeout=30)
    assert results == ["done"]
    assert events == ["low works", "high has them", "low works"]


def test_the_step_returns_the_layout_in_words_and_its_line_has_another_than_data_parallel(
    home: Path, tmp_path: Path
) -> None:
    run = finished_training((tmp_path / "store").as_uri())
    plan, _ = plan_and_estimate(HEAVY)
    run.write(plan)
    reference = step.work(doors.attach(run))
    assert reference["layout"] == plan.layout_in_words
    assert step.summary(reference).endswith(f"of training; {plan.layout_in_words}")
    run.write(plan_and_estimate(HEAVY, layout="data-parallel")[0])
    assert step.summary(step.work(doors.attach(run))).endswith("of training")
