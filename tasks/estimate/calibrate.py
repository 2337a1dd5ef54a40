"""Finds or measures calibrations of this machine's devices. (`link` has the link between ranks.)

A calibration is looked up in the cache under the trainwright home, then in the store, where
machines with the same processor and torch share theirs; otherwise it is measured now.

    <store>/calibrations/<device type>/<key>.json       key: of processor, torch and threads
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainwright.estimator.devices import EMULATED, known_type
from trainwright.estimator.machine import MOST_DRIFT, busy, machine_key, processor
from trainwright.estimator.measure.energy_meter import RAPL_ROOT
from trainwright.estimator.named_file import require_space
from trainwright.estimator.predict.calibration import Calibration, load, parse, save
from trainwright.estimator.predict.loop_cost import LoopCost
from trainwright.infra.cpu_share import cpu_share
from trainwright.infra.lock import locked
from trainwright.infra.process import dying_with_parent
from trainwright.tasks import progress
from trainwright.tasks.errors import BadInput, Interrupted, RunHeld, TrainwrightError, from_document
from trainwright.tasks.estimate.link import renew_link
from trainwright.tasks.estimate.passes import renew_passes
from trainwright.tasks.estimate.training_probe import can_train, measured_by
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.pool import LOCAL_ADDRESSES
from trainwright.tasks.storage.connect import open_store
from trainwright.tasks.units import counted

FIRST_USE_S = 35.0
SECOND_S = 20.0
"""for another number of threads"""
BUDGET_S = 90.0
PROBES_S = 20.0
LEAST_BUDGET_S = 1.0
MOST_PROBES_S = 30.0
LOOP_S = 3.0
PROCESS_S = 4.0
"""one training of a tiny model"""
BUSY_KEPT_S = 600.0
"""How long to use a calibration of a busy machine, so that not every step measures again."""
_LOADING_S = 5.0
_MOST_BYTES = 8 << 20
"""disk space for a calibration and its samples"""
_HOME = "TRAINWRIGHT_HOME"
"""the setting that says where the cache is"""


def calibration_for(
    threads: int,
    settings: Settings,
    store: str | None = None,
    *,
    like: Calibration | None = None,
) -> Calibration:
    """This machine's calibration for a number of CPU threads: cached, from the store, or measured.

    Measuring takes a minute, and half as long with `like`, the calibration for another number of
    threads, which knows the rest. `store` is a URI; default: the settings'. A busy machine is
    measured too; its calibration states the drift, and is used for BUSY_KEPT_S only.
    """
    path = cached(threads, settings)
    if (known := _from_cache(path)) is not None and known.loop is not None:
        return known
    require_space(path, _MOST_BYTES, _HOME)
    # Another process may be measuring the same: then use its result.
    with _lock(path, _HOME, wait=True) as lock:
        if (known := _from_cache(path, report=True)) is not None:
            return known if known.loop is not None else _with_training(path, known)
        if (known := from_store(store or settings.store, "cpu", threads, settings)) is not None:
            save(known, path)
            return known if known.loop is not None else _with_training(path, known)
        budget_s = FIRST_USE_S if like is None else SECOND_S
        about_s = budget_s + _LOADING_S + (LOOP_S + PROCESS_S if like is None else 0.0)
        with_threads = counted(threads, "thread")
        progress.emit(
            "notice",
            message=f"measuring this machine ({with_threads}) once, for about {about_s:.0f} s",
        )
        measured = _run(path, budget_s, threads, lock, "--most-drift", "inf")
        if like is None:
            made = _with_training(path, measured)
        else:
            made = measured.model_copy(
                update={"loop": like.loop, "process_bytes": like.process_bytes}
            )
            save(made, path)
        _warn_if_busy(made)
        return made


def known_calibration(threads: int, settings: Settings) -> Calibration | None:
    """This machine's calibration for a number of CPU threads, if the cache or the store has it."""
    return _from_cache(cached(threads, settings)) or from_store(
        settings.store, "cpu", threads, settings
    )


def calibrate(
    out: Path,
    *,
    budget_s: float | None = None,
    device: str = "cpu",
    threads: int = 1,
    probes: bool = False,
    most_drift: float = MOST_DRIFT,
    powercap: Path = RAPL_ROOT,
    named: str = "--out",
) -> Calibration:
    """Measure a device of this machine for `budget_s` in a separate process; write the result.

    `device` is `cpu` or a GPU by torch's name, such as `cuda:0`. With `probes` the budget is small
    and the calibration's mode is few-shot. A measurement that was interrupted continues. `powercap`
    is where the CPU's energy counters are, `named` the option or variable that says where `out` is.

    Raises BadInput; RunHeld if another process measures into `out`; BusyMachine if the machine's
    speed spread by more than `most_drift`, and then writes nothing.
    """
    budget_s = budget_s if budget_s is not None else PROBES_S if probes else BUDGET_S
    processors = os.cpu_count() or 1
    if not 1 <= threads <= processors:
        raise BadInput(
            f"--threads: got {threads}; allowed: 1 to {processors}, the processors of this machine"
        )
    if probes and not LEAST_BUDGET_S <= budget_s <= MOST_PROBES_S:
        raise BadInput(
            f"--budget: got {budget_s:g}; "
            f"allowed with --probes: {LEAST_BUDGET_S:g} to {MOST_PROBES_S:g} s"
        )
    if not LEAST_BUDGET_S <= budget_s < math.inf:
        raise BadInput(
            f"--budget: got {budget_s:g}; allowed: a finite number, {LEAST_BUDGET_S:g} s or more"
        )
    if not most_drift >= 0:
        raise BadInput(f"--most-drift: got {most_drift:g}; allowed: 0 or more")
    if out.exists() and not out.is_file():  # writing would replace it
        raise BadInput(f"{named}: {out}: is a folder or a device; allowed: a regular file")
    require_space(out, _MOST_BYTES, named)
    with _lock(out, named, wait=False) as lock:
        options = ["--device", device, "--most-drift", str(most_drift), "--powercap", str(powercap)]
        options += ["--mode", "few-shot"] if probes else []
        made = _run(out, budget_s, threads, lock, *options)
        return _with_training(out, made) if made.device_type == "cpu" else made


def calibrate_and_share(
    device_type: str,
    threads: int,
    settings: Settings,
    *,
    budget_s: float = BUDGET_S,
    most_drift: float = MOST_DRIFT,
    store: str | None = None,
) -> dict[str, Any]:
    """Measure this machine, the link between its ranks, and passes of pipelines.

    Writes all to the cache, and the calibration to the store. Returns a small reference. Raises as
    `calibrate` does; TrainwrightError if the link or passes can't be measured; ServiceUnreachable
    if the store can't be written (the cache then has the calibration).
    """
    known_type(device_type)
    objects = open_store(
        f"{(store or settings.store).rstrip('/')}/calibrations/{device_type}", settings
    )
    path = cached(threads, settings)
    made = calibrate(
        path,
        budget_s=budget_s,
        device=device_type,
        threads=threads,
        most_drift=most_drift,
        named=_HOME,
    )
    renew_link(settings)
    renew_passes(settings)
    name = f"{key(threads)}.json"
    objects.put(name, path.read_bytes())
    shown = made.model_dump(
        mode="json",
        include={
            "device_type",
            "threads",
            "measurements",
            "sentinel_drift",
            "cross_validated_error",
            "duration_s",
        },
    )
    return {"calibration": f"{objects.uri}/{name}", **shown}


def why_not_here(device_type: str, addresses: Sequence[str]) -> str | None:
    """The reason why this machine can't measure a pool's device type; None if it can.

    `addresses` are those at which the pool has such devices. Raises BadInput for an unknown type.
    """
    known_type(device_type)
    if device_type == EMULATED:
        return "emulated: its step time is configured, not measured"
    if device_type != "cpu":
        return (
            f"{device_type}: this task does not measure GPUs; "
            "use `trainwright calibrate --device cuda:0`"
        )
    if not any(address in LOCAL_ADDRESSES for address in addresses):
        return f"{device_type}: the pool has it at {', '.join(addresses)}, not on this machine"
    return None


def given(path: Path) -> Calibration:
    """The calibration in a file that a user gives. Raises BadInput if it is not one.

    One that was measured with another version of torch has a wider interval, and a notice says so.
    """
    found = load(path, importlib.metadata.version("torch"))
    if (note := found.torch_note()) is not None:
        progress.emit("notice", message=f"{path}: {note}")
    return found


def from_store(uri: str, device_type: str, threads: int, settings: Settings) -> Calibration | None:
    """The calibration of an equal machine from the store; None if there is none."""
    try:
        objects = open_store(f"{uri.rstrip('/')}/calibrations/{device_type}", settings)
        name = f"{key(threads)}.json"
        found = parse(objects.get(name), f"{objects.uri}/{name}")
    except FileNotFoundError:
        return None
    except (TrainwrightError, OSError) as error:
        progress.emit("notice", message=f"the store's calibration is not used: {error}")
        return None
    here = (device_type, processor(), threads, importlib.metadata.version("torch"))
    if (found.device_type, found.processor, found.threads, found.torch) != here:
        progress.emit(
            "notice",
            message=f"{objects.uri}/{name}: not used: from another processor or torch",
        )
        return None
    progress.emit("notice", message=f"calibration: {objects.uri}/{name}, of {found.created_at}")
    return found


def key(threads: int) -> str:
    """The key of a calibration: processor, torch and threads."""
    return f"{machine_key()}-{threads}-threads"


def cached(threads: int, settings: Settings) -> Path:
    """The path of this machine's calibration."""
    return settings.home / "calibrations" / f"cpu-{key(threads)}.json"


def _from_cache(path: Path, *, report: bool = False) -> Calibration | None:
    """The cached calibration, if it is usable; with `report`, a notice says why it is not."""
    if not path.exists():
        return None
    why = None
    try:
        known = load(path)
        if known.torch != (here := importlib.metadata.version("torch")):
            why = f"{path}: measured with torch {known.torch}; the installed one is {here}"
        elif known.sentinel_drift > MOST_DRIFT and time.time() - path.stat().st_mtime > BUSY_KEPT_S:
            why = f"{path}: measured while the machine was busy"
    except BadInput as error:
        why = str(error)
    if why is not None:
        if report:
            progress.emit("notice", message=f"{why}; measuring again")
        return None
    _warn_if_busy(known)
    return known


def _warn_if_busy(calibration: Calibration) -> None:
    if calibration.sentinel_drift > MOST_DRIFT:
        progress.emit(
            "notice",
            message=f"{busy(calibration.sentinel_drift)}: predictions are rough; "
            f"it is measured again after {BUSY_KEPT_S / 60:.0f} minutes",
        )


@contextlib.contextmanager
def _lock(out: Path, named: str, *, wait: bool) -> Iterator[int]:
    """Lets one process at a time measure into a file; yields the lock's descriptor."""
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(locked(out.with_name(f"{out.name}.lock"), wait=wait))
        except BlockingIOError:
            raise RunHeld(
                f"calibrate: another process is measuring into {out}; "
                f"wait for it, or choose another {named}"
            ) from None
        except OSError as error:
            raise BadInput(f"{named}: {out}: can't be written ({error.strerror})") from None
        yield held


def _with_training(out: Path, calibration: Calibration) -> Calibration:
    """Measure the training loop's time and a rank's memory, each in a process; write all."""
    if not can_train("the training loop's time per step, and a rank's memory,"):
        return calibration
    started, worker = time.monotonic(), "trainwright.tasks.train.worker"
    loop = measured_by(f"{worker}.measure_loop", "the training loop", LOOP_S)
    process = measured_by(f"{worker}.measure_process", "a rank's memory", PROCESS_S)
    made = calibration.model_copy(
        update={
            "loop": LoopCost.model_validate_json(loop),
            "process_bytes": float(json.loads(process)),
            "duration_s": calibration.duration_s + time.monotonic() - started,
        }
    )
    save(made, out)
    return made


def _run(out: Path, budget_s: float, threads: int, lock: int, *options: str) -> Calibration:
    """Measure in a separate process, which inherits the lock and ends with this one."""
    command = [sys.executable, "-m", "trainwright.estimator.measure.measure_device"]
    command += ["--out", str(out.absolute()), "--budget", str(budget_s), "--threads", str(threads)]
    command += options
    last, failure = "", None
    with (
        cpu_share("calibrate", threads) as share,
        subprocess.Popen(
            dying_with_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(lock,),
        ) as process,
    ):
        share.take(process.pid)  # measured in the surroundings of a rank
        try:
            for line in process.stderr or ():
                last = line.strip() or last
                message = _parsed(line)
                if "error" in message:
                    failure = from_document(message["error"])
                elif message:
                    progress.emit("calibrate", **message, budget_s=budget_s)
        except KeyboardInterrupt:
            process.kill()
            raise Interrupted(
                "calibrate: interrupted; the same command continues the measurement"
            ) from None
        except BaseException:
            process.kill()
            raise
    if failure is not None:
        raise failure
    if process.returncode != 0:
        raise TrainwrightError(
            f"calibrate: the measuring process exited with {process.returncode}: {last[:300]}"
        )
    return load(out)


def _parsed(line: str) -> dict[str, Any]:
    """A message of the measuring process; empty for other output, such as a library's warning."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and ("message" in found or "error" in found) else {}
