"""Measurements of finished runs by device type: one object per run in the store, written once.

    <store>/calibrations/<device type>/runs/<run id>.json

Step `store` adds a run's object; the next prediction reads them (`estimator.predict.correction`
applies them). Objects are cached under the trainwright home, so that each is fetched once.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from trainwright.estimator.predict.correction import SCHEMA_VERSION, Finding, FinishedRun
from trainwright.tasks import progress
from trainwright.tasks.errors import ServiceUnreachable
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import Plan, PlannedDevice
from trainwright.tasks.runs.artefacts.training_result import DeviceResult, Result, split_since
from trainwright.tasks.runs.run import Run
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.documents import one_line
from trainwright.tasks.storage.connect import open_store
from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.storage.objects import ObjectInfo, ObjectStore

NEWEST = 100
_NAME = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{6}\.json")
_LARGEST_BYTES = 1_000_000


def append(run: Run) -> list[str]:
    """Write a trained run's measurements, one object per device type. Returns the objects' URIs.

    Leaves out emulated devices, and devices that were predicted without a calibration.
    """
    findings: dict[str, list[Finding]] = {}
    result, plan, predicted = run.read(Result), run.read(Plan), run.read(Estimate)
    steps = result.steps - split_since(
        result.split_events, [device.batch_size for device in plan.devices]
    )
    for planned, device in zip(plan.devices, result.devices, strict=True):
        layout = plan.layout
        if layout is not None and (layout.has_stages or layout.recomputed(planned.id)):
            continue  # its time and memory are not those of the calibration's step
        finding = _finding(predicted, result, planned, device, plan.accumulation, steps)
        if finding is not None:
            findings.setdefault(planned.type, []).append(finding)
    written = []
    for device_type, found in findings.items():
        objects, name = _objects(run.store_uri, device_type, run.settings), f"{run.id}.json"
        document = FinishedRun(run=run.uri, device_type=device_type, findings=tuple(found))
        objects.create(name, document.model_dump_json(indent=1).encode())
        written.append(f"{objects.uri}/{name}")
    return written


def _finding(
    predicted: Estimate,
    result: Result,
    planned: PlannedDevice,
    device: DeviceResult,
    pieces: int,
    steps: int,
) -> Finding | None:
    """A device's measured values and its calibration's prediction; None if not comparable.

    For a step of `pieces` micro-batches, the values are of one micro-batch, without the accumulated
    gradients. `steps` is the number of steps with the device's final batch size.
    """
    curve = predicted.find(planned)
    if curve is None:  # a replayed plan, made for other devices
        return None
    if planned.type == "cpu" and not planned.local:  # the host may have another processor
        return None
    time_knots = curve.calibrated_time_knots or curve.time_knots
    took = device.step_time_s
    if curve.basis is None or time_knots is None or took is None or took.median <= 0:
        return None
    if result.versions.get("torch") != curve.basis.torch:  # the run continued on another machine
        return None
    of_this_plan = [
        one for one in result.split_events if len(one.batch_sizes) == len(result.devices)
    ]
    largest = max(
        device.batch_size,
        planned.batch_size,
        *(one.batch_sizes[device.rank] for one in of_this_plan),
    )
    size, largest = math.ceil(device.batch_size / pieces), math.ceil(largest / pieces)
    predicted_s, predicted_bytes = time_knots(size), curve.memory_bytes(largest)
    measured_bytes = device.peak_memory_bytes - (predicted.gradient_bytes if pieces > 1 else 0.0)
    if size < 1 or predicted_s <= 0 or predicted_bytes <= 0 or measured_bytes <= 0:
        return None
    return Finding(
        basis=curve.basis,
        cores=planned.cores,
        batch_size=size,
        steps=max(1, steps),
        predicted_step_time_s=predicted_s,
        predicted_loop_s=curve.loop_part_s(size),
        measured_step_time_s=took * (1 / pieces),
        memory_batch_size=largest,
        predicted_peak_memory_bytes=predicted_bytes,
        kept_bytes=curve.kept_bytes,
        measured_peak_memory_bytes=measured_bytes,
    )


def read(store_uri: str, device_types: Iterable[str], settings: Settings) -> list[FinishedRun]:
    """The newest runs' measurements of these device types; unreadable ones give a notice.

    Raises ServiceUnreachable if the store does not answer.
    """
    return [
        one
        for device_type in sorted(set(device_types))
        for one in _read_type(store_uri, device_type, settings)
    ]


def _read_type(store_uri: str, device_type: str, settings: Settings) -> list[FinishedRun]:
    objects = _objects(store_uri, device_type, settings)
    named = [item for item in objects.list() if _NAME.fullmatch(item.key)]
    kept = (
        settings.home / "calibration-sets" / hashlib.sha256(objects.uri.encode()).hexdigest()[:16]
    )
    found = []
    for item in named[-NEWEST:]:  # ids begin with the time
        try:
            found.append(
                _kept(kept / item.key, device_type) or _fetched(objects, item, device_type, kept)
            )
        except FileNotFoundError:
            continue  # deleted since it was listed
        except (ValueError, OSError) as error:
            why = one_line(error) if isinstance(error, ValidationError) else error
            progress.emit(
                "notice", message=f"{objects.uri}/{item.key}: not used for predictions: {why}"
            )
    return found


def _kept(copy: Path, device_type: str) -> FinishedRun | None:
    """The cached copy of an object, which never changes; None if it is missing or damaged."""
    try:
        return _parsed(copy.read_bytes(), device_type)
    except (ValueError, OSError):
        return None


def _fetched(objects: ObjectStore, item: ObjectInfo, device_type: str, folder: Path) -> FinishedRun:
    if item.size > _LARGEST_BYTES:
        raise ValueError(f"larger than {_LARGEST_BYTES} bytes")
    data = objects.get(item.key)
    found = _parsed(data, device_type)
    with contextlib.suppress(ServiceUnreachable):  # without a copy, the next call fetches it again
        FolderStore(folder).put(item.key, data)
    return found


def _parsed(data: bytes, device_type: str) -> FinishedRun:
    found = FinishedRun.model_validate_json(data)
    if found.schema_version > SCHEMA_VERSION or found.device_type != device_type:
        raise ValueError(f"has schema version {found.schema_version}, for {found.device_type}")
    return found


def _objects(store_uri: str, device_type: str, settings: Settings) -> ObjectStore:
    open_store(store_uri, settings)  # an error names the store itself, not the folder in it
    return open_store(f"{store_uri.rstrip('/')}/calibrations/{device_type}/runs", settings)
