"""Several jobs on one pool: least energy with every deadline met, or which job is late."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner_cases import data_of

from trainwright.estimator.curves import Affine, DeviceCurve
from trainwright.tasks.allocate.joint_planner import Pending, choices, make_joint_plan
from trainwright.tasks.allocate.schedule import ScheduleChoice
from trainwright.tasks.errors import BadInput, Infeasible
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import JointPlan
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Pool

ESTIMATE = Estimate(
    mode="datasheet",
    gradient_bytes=1e6,
    curves=[
        DeviceCurve(
            device_type=name,
            mode="datasheet",
            coverage=1.0,
            step_time_s=Affine(fixed=0.01, per_sample=sample_s),
            low_factor=0.8,
            high_factor=1.2,
            peak_memory_bytes=Affine(fixed=1e8, per_sample=1e6),
            memory_safe_factor=1.2,
            memory_limit_bytes=1e10,
            idle_w=20,
            load_w=load,
            energy_source="datasheet",
        )
        for name, sample_s, load in (("nvidia-t4", 2e-3, 70), ("nvidia-a10", 1e-3, 180))
    ],
)


def pool(first: int, second: int) -> Pool:
    kinds = [("nvidia-t4", first), ("nvidia-a10", second)]
    devices = [{"type": name, "count": count} for name, count in kinds if count]
    return Pool.model_validate(
        {"name": "p", "hosts": [{"name": "h", "address": "10.0.0.1", "devices": devices}]}
    )


def pending(pool: Pool, name: str, epochs: int, deadline_s: float | None, **more: Any) -> Pending:
    values: dict[str, Any] = {
        "name": name,
        "data": {"uri": "x"},
        "train": {"epochs": epochs, "global_batch_size": 64},
        "objective": {"minimize": "energy"}
        | ({"deadline": f"{deadline_s!r}s"} if deadline_s else {}),
        **more,
    }
    return Pending(Job.model_validate(values), pool, ESTIMATE, data_of(1000))


def brute(
    options: Sequence[Sequence[ScheduleChoice]], deadlines: Sequence[float], room: dict[object, int]
) -> float:
    """The least energy over all choices and starts.

    If no job can start earlier, every start is a sum of durations.
    """
    best = math.inf
    for combination in itertools.product(*options):
        energy = sum(one.energy_j for one in combination)
        if energy >= best:
            continue
        durations = [one.upper_s for one in combination]
        starts = sorted(
            {
                sum(some)
                for size in range(len(durations))
                for some in itertools.combinations(durations, size)
            }
        )
        for begins in itertools.product(starts, repeat=len(combination)):
            ends = [begin + one.upper_s for begin, one in zip(begins, combination, strict=True)]
            if any(
                end > deadline * (1 + 1e-9) for end, deadline in zip(ends, deadlines, strict=True)
            ):
                continue
            if all(
                sum(
                    dict(one.holds).get(key, 0)
                    for one, begin, end in zip(combination, begins, ends, strict=True)
                    if begin <= at < end - 1e-9
                )
                <= limit
                for key, limit in room.items()
                for at in begins
            ):
                best = energy
                break
    return best


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.tuples(st.integers(1, 2), st.integers(0, 2)),
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.5, 4)), min_size=2, max_size=3),
)
def test_no_other_schedule_meets_all_deadlines_with_less_energy(
    counts: tuple[int, int], jobs: list[tuple[int, float]]
) -> None:
    chosen = pool(*counts)
    free = [pending(chosen, f"j{number}", epochs, None) for number, (epochs, _) in enumerate(jobs)]
    options = [choices(one, None)[0] for one in free]
    deadlines = [
        min(one.upper_s for one in choices) * slack
        for choices, (_, slack) in zip(options, jobs, strict=True)
    ]
    room: dict[object, int] = {}
    for choice in itertools.chain.from_iterable(options):
        for key, _ in choice.holds:
            room[key] = counts[0] if "nvidia-t4" in str(key) else counts[1]
    expected = brute(options, deadlines, room)
    made = make_joint_plan(
        [
            pending(chosen, f"j{number}", epochs, deadline)
            for number, ((epochs, _), deadline) in enumerate(zip(jobs, deadlines, strict=True))
        ]
    )
    assert made.search == "exact"
    assert made.feasible == math.isfinite(expected)
    if made.feasible:
        assert made.energy_j == pytest.approx(expected, rel=1e-9)
    check(made)


def check(made: JointPlan) -> None:
    """Check that no device is used twice at once, and that only late jobs miss their deadlines."""
    for one, other in itertools.combinations(made.jobs, 2):
        if one.starts_s < other.ends_s and other.starts_s < one.ends_s:
            assert not {device.id for device in one.devices} & {
                device.id for device in other.devices
            }
    for job in made.jobs:
        assert sum(device.batch_size for device in job.devices) == job.global_batch_size
        assert job.slips == (job.job in made.slips)
        assert job.slips or job.deadline_s is None or job.ends_s <= job.deadline_s * (1 + 1e-9)


def test_jobs_run_in_turn_to_save_energy_and_at_once_under_tight_deadlines() -> None:
    chosen = pool(0, 2)
    relaxed = make_joint_plan([pending(chosen, "a", 20, None), pending(chosen, "b", 20, None)])
    assert relaxed.feasible
    latest = max(job.ends_s for job in relaxed.jobs)
    alone = [choices(pending(chosen, name, 20, None), None)[0] for name in ("a", "b")]
    assert relaxed.energy_j == pytest.approx(sum(options[0].energy_j for options in alone))
    hurried = make_joint_plan([pending(chosen, name, 20, latest * 1.01) for name in ("a", "b")])
    assert hurried.feasible
    check(hurried)


def test_the_job_of_lower_priority_is_late_if_not_all_can_meet_their_deadlines() -> None:
    chosen = pool(0, 1)
    needed = choices(pending(chosen, "a", 20, None), None)[0][0].upper_s
    made = make_joint_plan(
        [pending(chosen, "a", 20, needed * 1.1, priority=1), pending(chosen, "b", 20, needed * 1.1)]
    )
    assert not made.feasible
    assert made.slips == ["b"]
    check(made)


def test_a_late_job_takes_the_faster_device_rather_than_the_economical_one() -> None:
    chosen = pool(1, 1)
    options = choices(pending(chosen, "a", 20, None), None)[0]
    quickest = min(one.upper_s for one in options)
    assert options[0].upper_s > 1.2 * quickest  # the choice of least energy
    made = make_joint_plan([pending(chosen, "a", 20, quickest / 1.05)])
    assert made.slips == ["a"]
    assert made.jobs[0].ends_s <= 1.1 * quickest / 1.05 * (1 + 1e-9)


def test_a_job_whose_batch_does_not_fit_accumulates_while_another_runs() -> None:
    chosen = pool(1, 0)
    small = ESTIMATE.model_copy(
        update={
            "curves": [
                one.model_copy(update={"memory_limit_bytes": 1.5e8}) for one in ESTIMATE.curves
            ]
        }
    )
    jobs = [pending(chosen, name, 1, None) for name in ("a", "b")]
    made = make_joint_plan([jobs[0], dataclasses.replace(jobs[1], estimate=small)])
    check(made)
    pieces = {job.job: job.accumulation for job in made.jobs}
    assert pieces["a"] == 1
    assert pieces["b"] > 1
    (device,) = next(job for job in made.jobs if job.job == "b").devices
    curve = small.curve(device)
    assert curve.device_memory_bytes(64) > 1.5e8
    assert curve.device_memory_bytes(64 // pieces["b"]) < device.peak_memory_bytes <= 1.5e8
    assert device.step_time_s == curve.step_time(64, pieces["b"])


def test_jobs_that_together_exceed_the_hosts_windows_are_infeasible() -> None:
    chosen = pool(0, 1)
    alone, _ = choices(pending(chosen, "a", 20, None), None)
    left_s = 1.5 * alone[0].upper_s  # the window has time for one job only
    window = chosen.hosts[0].model_copy(update={"available": "00:00-12:00"})
    ending = chosen.model_copy(update={"hosts": [window]})
    now = datetime(2026, 1, 5, 12, tzinfo=UTC) - timedelta(seconds=left_s)
    assert make_joint_plan([pending(ending, "a", 20, None)], now=now).feasible
    for deadline in (None, left_s):
        with pytest.raises(Infeasible, match="within the hosts' windows") as caught:
            make_joint_plan([pending(ending, name, 20, deadline) for name in ("a", "b")], now=now)
        assert caught.value.details["binding"] == "availability"


def test_with_too_many_orders_to_try_the_important_jobs_meet_their_deadlines() -> None:
    chosen = pool(1, 1)
    needed = choices(pending(chosen, "a", 20, None), None)[0][0].upper_s
    jobs = [
        pending(chosen, f"j{number}", 10 + number, needed * (4 + number % 3), priority=number % 4)
        for number in range(16)
    ]
    made = make_joint_plan(jobs)
    check(made)
    assert len(made.jobs) == len(jobs)
    assert made.search == "bounded"
    alone = [
        pending(
            chosen,
            f"j{number}",
            10 + number,
            None if f"j{number}" in made.slips else one.job.objective.deadline,
        )
        for number, one in enumerate(jobs)
    ]
    least = sum(make_joint_plan([one]).energy_j for one in alone)
    assert least == pytest.approx(made.energy_j * (1 - made.gap))
    in_time = [one.job.priority for one in jobs if one.job.name not in made.slips]
    assert 3 <= len(in_time) < len(jobs)
    assert in_time.count(3) >= in_time.count(0)


def test_many_jobs_with_loose_deadlines_all_meet_them() -> None:
    chosen = pool(2, 2)
    needed = choices(pending(chosen, "a", 20, None), None)[0][0].upper_s
    made = make_joint_plan([pending(chosen, f"j{number}", 20, needed * 10) for number in range(12)])
    assert made.feasible
    check(made)


def test_jobs_that_can_not_be_planned_together_give_one_clear_line() -> None:
    chosen = pool(1, 1)
    with pytest.raises(BadInput, match="jobs: got a, a; allowed: different names"):
        make_joint_plan([pending(chosen, "a", 1, None)] * 2)
    with pytest.raises(BadInput, match="jobs: got 33; allowed: at most 32"):
        make_joint_plan([pending(chosen, f"a{number}", 1, None) for number in range(33)])
    only = {"ids": ["h/nvidia-t4-0"]}
    with pytest.raises(
        BadInput,
        match="'h/nvidia-t4-0' in a; when planning several jobs, restrict devices by type or host",
    ):
        make_joint_plan(
            [pending(chosen, "a", 1, None, devices=only), pending(chosen, "b", 1, None)]
        )
