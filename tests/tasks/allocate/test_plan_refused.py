"""Input that the planner refuses, each with one line."""

from __future__ import annotations

from typing import Any

import pytest
from plans import DATA, MANY, TWO, curve, plan

from trainwright.estimator.curves import Affine, Knots
from trainwright.tasks.errors import BadInput, Infeasible
from trainwright.tasks.spec.documents import validated
from trainwright.tasks.spec.eligibility import usable
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Pool


def test_batch_bounds_above_the_number_of_training_rows_are_reported() -> None:
    found = plan(TWO, train={"batch_bounds": [5000, 9000]})
    assert found.global_batch_size == DATA.train_rows
    assert "batch_bounds start above that, at 5000" in found.batch_rule


def test_minimising_cost_without_prices_is_bad_input() -> None:
    with pytest.raises(BadInput, match="has no prices"):
        plan(TWO, objective={"minimize": "cost"})


@pytest.mark.parametrize("objective", [{"minimize": "cost"}, {"minimize": "time", "budget": 9.0}])
def test_a_device_without_a_price_is_left_out_of_a_plan_with_a_cost_and_the_plan_says_so(
    objective: dict[str, Any],
) -> None:
    quick = curve(1.0).model_copy(
        update={
            "device_type": "nvidia-t4",
            "cores": None,
            "step_time_s": Affine(fixed=1e-6, per_sample=1e-6),
        }
    )
    hosts = [{"name": "a", "devices": [{"type": "cpu"}, {"type": "nvidia-t4", "count": 2}]}]
    pool, curves = {"hosts": hosts, "prices": {"cpu": "1/h"}}, [curve(1.0), quick]
    made = plan(pool, curves=curves, objective=objective)
    assert [device.type for device in made.devices] == ["cpu"]
    assert made.searched is not None
    assert (made.searched.devices, made.searched.without_price) == (1, {"nvidia-t4": 2})
    free = plan(pool, curves=curves, objective={"minimize": "time"})
    assert {device.type for device in free.devices} == {"nvidia-t4"}
    assert free.searched is not None
    assert (free.searched.devices, free.searched.without_price) == (3, {})


def test_what_is_refused_after_a_calibration_on_a_busy_machine_says_so() -> None:
    late: dict[str, Any] = {"objective": {"minimize": "time", "deadline": "1ms"}}
    for drift, says in ((0.5, False), (323.2, True)):
        measured = [curve(cores).model_copy(update={"speed_drift": drift}) for cores in (1.0, 0.5)]
        with pytest.raises(Infeasible, match="no feasible plan") as raised:
            plan(TWO, curves=measured, **late)
        assert (
            "its speed varied by a factor of 324, so this is rough" in str(raised.value)
        ) == says


def test_too_little_memory_for_the_smallest_batch_with_a_sample_each_names_that_batch() -> None:
    with pytest.raises(Infeasible, match="a global batch of 2 does not fit"):
        plan(TWO, memory=1e8, train={"batch_bounds": [1, 4]}, devices={"min_count": 2})


def test_the_jobs_restrictions_are_kept_and_unknown_names_refused() -> None:
    pool = Pool.model_validate({"name": "p", **MANY})
    chosen = Job.model_validate(
        {"name": "j", "data": {"uri": "x"}, "devices": {"exclude": ["a/cpu-0"]}}
    )
    assert "a/cpu-0" not in [device.id for device in usable(pool, chosen)]
    for field, names in (
        ("types", ["nvidia-t4"]),
        ("hosts", ["z"]),
        ("ids", ["a/cpu-9"]),
        ("exclude", ["a/cpu-9"]),
    ):
        wrong = Job.model_validate({"name": "j", "data": {"uri": "x"}, "devices": {field: names}})
        with pytest.raises(BadInput, match=rf"devices\.{field}: got '{names[0]}'"):
            usable(pool, wrong)
    with pytest.raises(BadInput, match=r"devices\.min_count: got 9"):
        usable(
            pool,
            Job.model_validate({"name": "j", "data": {"uri": "x"}, "devices": {"min_count": 9}}),
        )


@pytest.mark.parametrize(
    ("pool", "job", "line"),
    [
        (
            TWO | {"prices": {"nvidia-t4": "1/h"}},
            {"objective": {"minimize": "cost"}},
            "no price for cpu",
        ),
        (
            TWO | {"prices": {"nvidia-t4": "1/h"}},
            {"objective": {"minimize": "time", "budget": 1.0}},
            "no price for cpu",
        ),
        (TWO, {"devices": {"min_count": 3}}, r"devices\.min_count: got 3; pool p has 2 device"),
        (
            TWO,
            {"devices": {"types": ["cpu"], "exclude": ["cpu"]}},
            r"^devices\.exclude: got cpu; "
            r"with this restriction the job may use 0 of the \d+ device",
        ),
        (
            TWO,
            {"devices": {"ids": ["a/cpu-0"], "exclude": ["a/cpu-0"]}},
            r"got ids \[a/cpu-0\], exclude \[a/cpu-0\]; with",
        ),
        (
            TWO,
            {"devices": {"min_count": 2}, "train": {"global_batch_size": 1}},
            r"devices\.min_count: got 2; allowed: at most 1, the global batch",
        ),
        (
            TWO,
            {"devices": {"min_count": 2}, "train": {"batch_bounds": [1, 1]}},
            r"devices\.min_count: got 2; allowed: at most 1, the upper end of train.batch_bounds",
        ),
        (
            {"hosts": [{"name": "a", "devices": [{"type": "cpu", "count": 1001}]}]},
            {"devices": {"min_count": 1001}, "train": {"batch_bounds": [1, 2000]}},
            r"devices\.min_count: got 1001; allowed: at most 1000, the number of training rows",
        ),
        (
            {
                "hosts": [
                    {"name": "a", "devices": [{"type": "cpu"}, {"type": "nvidia-t4"}]},
                ],
                "prices": {"cpu": "1/h"},
            },
            {"devices": {"min_count": 2}, "objective": {"budget": 1.0}},
            r"objective\.budget: got 1; the cost of 2 devices \(devices.min_count\) is not known: "
            r"pool p has no price for nvidia-t4",
        ),
        (
            TWO,
            {"train": {"global_batch_size": 1001}},
            r"train\.global_batch_size: got 1001; allowed: at most the 1000 training rows",
        ),
    ],
)
def test_a_contradictory_job_gives_one_clear_line(
    pool: dict[str, Any], job: dict[str, Any], line: str
) -> None:
    with pytest.raises(BadInput, match=line) as caught:
        plan(pool, **job)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"time_knots": Knots(sizes=(1, 2, 4), values=(2.0, 3.0, 1.0))},
            "falls to 1 s at a batch of 4",
        ),
        ({"step_time_s": Affine(fixed=1.0, per_sample=-0.1)}, "the step time of cpu falls"),
        ({"step_time_s": Affine(fixed=0.0, per_sample=0.0)}, "takes 0 s for a sample"),
        ({"idle_w": 30.0, "load_w": 20.0}, "draws 30 W idle and 20 W at work"),
    ],
)
def test_an_impossible_curve_is_refused(change: dict[str, Any], line: str) -> None:
    one = {"hosts": [{"name": "a", "devices": [{"type": "cpu", "cores": 1.0}]}]}
    with pytest.raises(BadInput, match=line):
        plan(one, curves=[curve(1.0).model_copy(update=change)])


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("network", {"bandwidth": "10"}, "a number with its unit"),
        ("prices", {"cpu": "-1/h"}, "a number of zero or more"),
        ("prices", {"gpu": "1/h"}, "not 'gpu'"),
        ("hosts", [], "at least 1 item"),
        ("power", {"cpu": {"idle_w": 9, "load_w": 3}}, "idle_w up to load_w"),
    ],
)
def test_an_impossible_pool_is_refused(field: str, value: Any, line: str) -> None:
    with pytest.raises(BadInput, match=line):
        validated(Pool, {"name": "p", **TWO, field: value}, "pool.yaml")


def test_limits_that_bind_only_together_are_reported_with_the_feasible_value_of_each() -> None:
    priced = MANY | {"prices": {"cpu": "1/h"}}
    long: dict[str, Any] = {"train": {"epochs": 1000, "global_batch_size": 1000}}
    quick = plan(priced, objective={"minimize": "time"}, **long).predicted
    cheap = plan(priced, objective={"minimize": "cost"}, **long).predicted
    assert quick is not None
    assert cheap is not None
    assert cheap.cost is not None
    limits = {"deadline": f"{quick.duration_s.high * 1.01}s", "budget": cheap.cost.high * 1.01}
    with pytest.raises(Infeasible, match="bind together") as caught:
        plan(priced, objective={"minimize": "energy", **limits}, **long)
    nearest = caught.value.details
    for field, value in (
        ("budget", nearest["nearest_budget"]),
        ("deadline", f"{nearest['nearest_deadline_s']}s"),
    ):
        assert plan(
            priced, objective={"minimize": "energy", **limits, field: value}, **long
        ).feasible


@pytest.mark.parametrize(
    ("train", "line"),
    [
        (
            {"global_batch_size": 2**20 + 1},
            "train.global_batch_size: got 1048577; allowed: at most 1048576",
        ),
        (
            {"batch_bounds": [1, 2**20 + 1]},
            "train.batch_bounds: got 1048577; allowed: at most 1048576",
        ),
    ],
)
def test_a_batch_above_the_maximum_is_refused(train: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput, match=line):
        plan(TWO, train=train)


def test_gradients_between_micro_batches_are_named_where_they_are_what_does_not_fit() -> None:
    l4 = curve(1.0).model_copy(
        update={
            "device_type": "nvidia-l4",
            "cores": None,
            "peak_memory_bytes": Affine(fixed=5e8, per_sample=4e8),
            "memory_safe_factor": 1.0,
            "memory_limit_bytes": 9.005e8,
        }
    )
    pool = {"hosts": [{"name": "a", "devices": [{"type": "nvidia-l4", "count": 2}]}]}
    with pytest.raises(
        Infeasible,
        match=r"a global batch of 3 does not fit; the largest that fits is 2; one sample takes "
        r"0\.84 GiB \(and 1 MiB for gradients between micro-batches\), nvidia-l4 has 0\.84",
    ):
        plan(pool, curves=[l4], train={"global_batch_size": 3})
