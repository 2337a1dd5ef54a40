"""Small plans on CPU devices, and pools for them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from trainwright.estimator.curves import Affine, Basis, DeviceCurve
from trainwright.estimator.predict.communication import Link
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Pool

DATA = DataSchema(
    task="image-classification",
    rows=1200,
    train_rows=1000,
    validation_rows=200,
    inputs={"inputs": (1, 8, 8)},
    input_dtypes={"inputs": "float32"},
    target="label",
    target_dtype="int64",
    classes=["0", "1"],
    sha256="0",
)
NOON = datetime(2026, 1, 5, 12, 0, tzinfo=UTC)
TWO: dict[str, Any] = {
    "hosts": [
        {"name": "a", "devices": [{"type": "cpu", "cores": 1.0}, {"type": "cpu", "cores": 0.5}]}
    ]
}
MANY = {
    "hosts": [
        {
            "name": "a",
            "devices": [
                {"type": "cpu", "cores": 1.0, "count": 4},
                {"type": "cpu", "cores": 0.5, "count": 4},
            ],
        }
    ]
}


def curve(cores: float, memory: float | None = None) -> DeviceCurve:
    """A CPU device: 2 ms + 1 ms a sample at one core, 20 W for each core."""
    return DeviceCurve(
        device_type="cpu",
        cores=cores,
        mode="calibrated",
        coverage=1.0,
        step_time_s=Affine(fixed=2e-3 / cores, per_sample=1e-3 / cores),
        low_factor=0.9,
        high_factor=1.2,
        peak_memory_bytes=Affine(fixed=1e8, per_sample=1e6),
        memory_safe_factor=1.25,
        memory_limit_bytes=memory,
        idle_w=5 * cores,
        load_w=20 * cores,
        energy_source="datasheet",
        basis=Basis(
            model="m", shares={"linear": 1.0}, calibration="c", processor="p", torch="2.8.0"
        ),
    )


def plan(
    pool: dict[str, Any],
    memory: float | None = None,
    link: Link | None = None,
    cycle_s: float = 0.0,
    *,
    curves: list[DeviceCurve] | None = None,
    now: datetime | None = None,
    most: int | None = None,
    **job: Any,
) -> Plan:
    """The plan of a job with these fields on this pool; every CPU device has the curve above."""
    chosen = Pool.model_validate({"name": "p", **pool})
    kinds = curves or [
        curve(cores, memory) for cores in {device.cores or 1.0 for device in chosen.devices()}
    ]
    estimate = Estimate(
        mode="calibrated", gradient_bytes=1e6, curves=kinds, local_link=link, cycle_s=cycle_s
    )
    values = {
        "name": "j",
        "data": {"uri": "builtin:digits"},
        "objective": {"minimize": "time"},
        **job,
    }
    return make_plan(
        Job.model_validate(values), chosen, estimate, DATA, now=now, most_accumulation=most
    )
