"""Step `estimate`: predicts the cost of a training step on each kind of device of the pool."""

from __future__ import annotations

from typing import Any

from trainwright.estimator.devices import DEVICE_TYPES
from trainwright.estimator.near_names import meant
from trainwright.estimator.predict.calibration import Calibration
from trainwright.estimator.predict.correction import learn
from trainwright.estimator.predict.step_time import estimate_step as step_document
from trainwright.estimator.predict.step_time import predict_curve
from trainwright.estimator.structure import Structure
from trainwright.tasks.context import Reference, RunContext
from trainwright.tasks.errors import BadInput
from trainwright.tasks.estimate import finished_runs, memory_limits
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.run import Run
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.eligibility import require_possible, usable
from trainwright.tasks.spec.pool import load_pool
from trainwright.tasks.spec.train_spec import check_batch_size
from trainwright.tasks.units import counted


def work(context: RunContext) -> Reference:
    """Predict time, memory and energy, corrected by the measurements of earlier runs."""
    run = context.run
    found = run.find(Estimate)
    if found is None:
        job = run.job()
        pool = load_pool(job.pool)
        # Check before measuring this machine, so that errors appear at once.
        require_possible(job, pool, run.data().train_rows)
        found = predicted(run)
        run.write(found)
    return {
        "artefact": Estimate.FILE,
        "mode": found.mode,
        "device_kinds": len(found.curves),
        "learned_from": found.learned_from,
    }


def summary(reference: Reference) -> str:
    """One line, as in `2 kinds of device, calibrated, corrected by 3 earlier runs`."""
    learned_from = reference["learned_from"]
    learned = f", corrected by {counted(learned_from, 'earlier run')}" if learned_from else ""
    return f"{counted(reference['device_kinds'], 'kind')} of device, {reference['mode']}{learned}"


def predicted(run: Run) -> Estimate:
    """Time, memory and energy on each kind of device that the pool has currently.

    Earlier runs, and memory limits that this run found, correct the prediction.
    """
    from trainwright.tasks.estimate.pool_estimate import estimate

    job = run.job()
    pool = load_pool(job.pool)
    devices = usable(pool, job)
    types = {device.type for device in devices}
    found = estimate(
        run.read(Structure),
        devices,
        settings=run.settings,
        power=pool.power,
        backend=job.train.backend,
        finished=finished_runs.read(run.store_uri, types, run.settings),
        store=run.store_uri,
    )
    return memory_limits.carried_over(found, run.find(Estimate))


def estimate_step(
    structure: Structure,
    settings: Settings,
    *,
    batch_size: int,
    device_type: str | None = None,
    calibration: Calibration | None = None,
    store: str | None = None,
) -> dict[str, Any]:
    """Time, memory and energy of one step on a device type, by a calibration or by the datasheet.

    With `store`, the runs that finished there correct a calibrated prediction.
    """
    check_batch_size(batch_size)
    chosen = device_type_of(device_type, calibration)
    curve = predict_curve(
        structure,
        calibration,
        device_type=chosen,
        cores=float(calibration.threads) if calibration is not None and chosen == "cpu" else None,
        speed=1.0 if chosen == "emulated" else None,
        batch_size=batch_size,
        by_layer=True,
    )
    if store is not None:
        curve = learn(curve, finished_runs.read(store, [curve.device_type], settings))
    return step_document(curve, batch_size)


def device_type_of(device_type: str | None, calibration: Calibration | None) -> str:
    """The requested device type. Raises BadInput if it is unknown, or not the calibration's."""
    chosen = device_type
    if chosen is None:  # an empty name counts as an unknown one
        chosen = calibration.device_type if calibration is not None else "cpu"
    if chosen not in DEVICE_TYPES:
        raise BadInput(
            f"device type: got {chosen[:80]!r}; allowed: {', '.join(sorted(DEVICE_TYPES))}"
            f"{meant(chosen, DEVICE_TYPES)}"
        )
    if calibration is not None and calibration.device_type != chosen:
        raise BadInput(
            f"device type: got {chosen!r}; the calibration is of {calibration.device_type}"
        )
    return chosen
