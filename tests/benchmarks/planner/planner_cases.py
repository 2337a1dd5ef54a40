"""Random small pools and jobs with many corner cases.

Ties, tight limits, binding memory, a single device, identical devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from hypothesis import strategies as st

from trainwright.estimator.curves import Affine, DeviceCurve, Knots
from trainwright.estimator.predict.communication import Link
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Pool

NOW = datetime(2026, 1, 5, 12, 0, tzinfo=UTC)
SLOW = {"bandwidth": "200Mbit", "latency": "5ms"}
FAST = {"bandwidth": "50Gbit", "latency": "10us"}
TYPES = ("nvidia-t4", "nvidia-a10", "nvidia-l4", "cpu")


@dataclass(frozen=True)
class Case:
    """A pool, a job, and its estimate."""

    pool: Pool
    job: Job
    estimate: Estimate
    data: DataSchema
    most_accumulation: int | None

    def within(self, deadline_s: float, budget: float) -> Case:
        """The same case with these limits."""
        limits = {
            "deadline": None if math.isinf(deadline_s) else deadline_s,
            "budget": None if math.isinf(budget) else budget,
        }
        objective = self.job.objective.model_copy(update=limits)
        return replace(self, job=self.job.model_copy(update={"objective": objective}))


def data_of(rows: int) -> DataSchema:
    """A data schema with this many training rows."""
    return DataSchema(
        task="image-classification",
        rows=rows,
        train_rows=rows,
        validation_rows=1,
        inputs={"inputs": (1,)},
        input_dtypes={"inputs": "float32"},
        target="label",
        target_dtype="int64",
        classes=None,
        sha256="0",
    )


MEMORIES = {None: None, "1GB": 1e9, "4GB": 4e9}
"""Memory that a host may state."""


def curves_on_hosts(draw: Any, curve: DeviceCurve) -> list[DeviceCurve]:
    """A CPU's curve on this machine and on others, by the memory that the host states."""
    return [
        curve.model_copy(
            update={
                "local": local,
                "host_memory_bytes": stated,
                "memory_limit_bytes": stated or draw(st.sampled_from([None, 4e8, 1.5e9])),
            }
        )
        for local in (True, False)
        for stated in MEMORIES.values()
    ]


@st.composite
def small_cases(draw: Any) -> Case:
    """Up to six devices of up to three types on up to three machines."""
    few = draw(st.booleans())  # few different numbers make ties
    number = (
        (lambda *choice: st.sampled_from(choice))
        if few
        else (lambda *choice: st.floats(min(choice), max(choice), allow_nan=False))
    )
    types = draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True))
    hosts, left = [], draw(st.sampled_from([1, 2, 3, 4, 5, 6, 6, 6]))
    for name in range(3):
        count = left if name == 2 else draw(st.integers(1, left))
        chosen = draw(st.lists(st.sampled_from(types), min_size=count, max_size=count))
        left -= count
        hosts.append(
            {
                "name": f"h{name}",
                "address": draw(st.sampled_from(["localhost", f"10.0.0.{name}", "10.0.0.9"])),
                "devices": [{"type": one} for one in chosen],
                "network": draw(
                    st.sampled_from([{}, {}, {"bandwidth": "100Mbit"}, {"latency": "20ms"}, SLOW])
                ),
                "inner": draw(
                    st.sampled_from([{}, {}, {"bandwidth": "50Gbit", "latency": "10us"}])
                ),
                "memory": draw(st.sampled_from([None, *MEMORIES])),
                "available": draw(
                    st.sampled_from([None, None, None, "11:00-12:01", "08:00-13:00", "13:00-14:00"])
                ),
            }
        )
        if left <= 0:
            break
    pool = {
        "name": "p",
        "network": {
            "bandwidth": draw(st.sampled_from(["1Gbit", "10Gbit"])),
            "latency": draw(st.sampled_from(["50us", "5ms"])),
        },
        "hosts": hosts,
        "prices": {one: f"{draw(number(0.0, 0.5, 2.0)):.3f}/h" for one in types}
        | {"energy": "0.25/kWh"},
    }
    curves = []
    for one in types:
        idle = draw(number(0.0, 10.0, 50.0))
        fixed, slope = draw(number(0.001, 0.01, 0.1)), draw(number(0.0001, 0.001, 0.01))
        memory, sample = draw(number(1e8, 1e9)), draw(number(1e6, 1e8))
        knots = None
        if draw(st.booleans()):
            rises = [draw(number(0.0, 0.01, 0.2)) for _ in range(4)]
            values = [fixed + sum(rises[: place + 1]) for place in range(4)]
            knots = Knots(
                sizes=draw(st.sampled_from([(1, 4, 8, 32), (4, 8, 16, 32)])), values=tuple(values)
            )
        curves.append(
            DeviceCurve(
                device_type=one,
                cores=1.0 if one == "cpu" else None,
                mode="datasheet",
                coverage=1.0,
                step_time_s=Affine(fixed=fixed, per_sample=slope),
                time_knots=knots,
                low_factor=0.5,
                high_factor=draw(number(1.2, 1.5, 3.0)),
                peak_memory_bytes=Affine(fixed=memory, per_sample=sample),
                memory_safe_factor=1.2,
                memory_limit_bytes=draw(st.sampled_from([None, 4e8, 1.5e9, 4e9])),
                idle_w=idle,
                load_w=idle + draw(number(0.0, 50.0, 200.0)),
                energy_source="datasheet",
            )
        )
    curves = [
        on_host
        for one in curves
        for on_host in (curves_on_hosts(draw, one) if one.device_type == "cpu" else [one])
    ]
    rows = draw(st.integers(40, 400))
    devices = sum(len(host["devices"]) for host in hosts)  # type: ignore[arg-type, misc]
    largest = (40, 40, 24, 12, 9, 8)[devices - 1]  # every split of the batch is enumerated
    size = draw(st.one_of(st.just("auto"), st.integers(1, largest)))
    least = draw(st.integers(1, devices if size == "auto" else min(devices, size)))
    job = {
        "name": "j",
        "data": {"uri": "x"},
        "train": {
            "global_batch_size": size,
            "batch_bounds": [
                draw(st.integers(4, min(10, largest))),
                draw(st.integers(min(10, largest), largest)),
            ],
            "epochs": draw(st.integers(1, 30)),
            "noise_scale": draw(st.sampled_from([None, None, 10.0, 100.0])),
        },
        "objective": {
            "minimize": draw(st.sampled_from(["energy", "cost", "time"])),
            "confidence": draw(st.sampled_from([0.5, 0.9, 0.95, 0.99])),
        },
        "devices": {"min_count": least, "max_count": draw(st.sampled_from([None, max(least, 3)]))},
    }
    measured = Link(
        bandwidth_bytes_per_s=draw(number(1e7, 1e9)),
        latency_s=1e-4,
        spread=draw(st.sampled_from([0.0, 0.2, 1.0])),
    )
    link = measured if draw(st.booleans()) else None
    estimate = Estimate(
        mode="datasheet",
        curves=curves,
        gradient_bytes=draw(number(1e5, 1e7, 1e8)),
        local_link=link,
        cycle_s=draw(st.sampled_from([0.0, 1e-3])),
    )
    return Case(
        Pool.model_validate(pool),
        Job.model_validate(job),
        estimate,
        data_of(rows),
        draw(st.sampled_from([None, None, 1, 4])),
    )
