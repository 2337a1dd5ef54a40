"""What is measured of this machine's devices; the link between its ranks is in `link`.

A calibration is looked for in the cache under the trainwright home, then in the store, where other machines of the same processor
and torch leave theirs; else it is measured now.

    <store>/calibrations/<device type>/<key>.json       key: of processor, torch and threads
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainwright.estimator.devices import EMULATED, known_type
from trainwright.estimator.machine import MOST_DRIFT, machine_key, processor
from trainwright.estimator.measure.energy_meter import RAPL_ROOT
from trainwright.estimator.named_file import require_space
from trainwright.estimator.predict.calibration import Calibration, load, parse, save
from trainwright.estimator.predict.loop_cost import LoopCost
from trainwright.infra.lock import locked
from trainwright.infra.process import dying_with_parent
from trainwright.tasks import progress
from trainwright.tasks.errors import BadInput, Interrupted, RunHeld, TrainwrightError, from_document
from trainwright.tasks.estimate.link import renew_link
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.pool import LOCAL_ADDRESSES
from trainwright.tasks.storage.connect import open_store

FIRST_USE_S = 35.0
BUDGET_S = 90.0
PROBES_S = 20.0
LEAST_BUDGET_S = 1.0
MOST_PROBES_S = 30.0
LOOP_S = 3.0
BUSY_KEPT_S = 600.0
"""for so long a calibration of a machine that was too busy is of use, so that not every step of a run measures anew"""
_LOADING_S = 5.0
_MOST_BYTES = 8 << 20
"""of a calibration, and of the samples that it is made of"""


def calibration_for(threads: int, settings: Settings, store: str | None = None) -> Calibration:
    """This machine's calibration for a number of CPU threads: from the cache, from the store, or measured now (a minute).

    `store` is a URI; default: the settings'. A busy machine is measured all the same; its calibration names the drift, and is of
    use for BUSY_KEPT_S only.
    """
    path = cached(threads, settings)
    if (known := _from_cache(path)) is not None and known.loop is not None:
        return known
    require_space(path, _MOST_BYTES, "--out")
    with _lock(
        path, wait=True
    ) as lock:  # another process may be measuring the same: its result is ours too
        if (known := _from_cache(path, tell=True)) is not None:
            return known if known.loop is not None else _with_loop(path, known)
        if (known := from_store(store or settings.store, "cpu", threads, settings)) is not None:
            save(known, path)
            return known if known.loop is not None else _with_loop(path, known)
        about_s = FIRST_USE_S + LOOP_S + _LOADING_S
        progress.emit(
            "notice",
            message=f"measuring this machine ({threads} thread(s)), once, for about {about_s:.0f} s",
        )
        measured = _run(path, FIRST_USE_S, threads, lock, "--most-drift", "inf")
        made = _with_loop(path, measured)
        _tell_if_busy(made)
        return made


def calibrate(
    out: Path,
    *,
    budget_s: float | None = None,
    device: str = "cpu",
    threads: int = 1,
    probes: bool = False,
    most_drift: float = MOST_DRIFT,
    powercap: Path = RAPL_ROOT,
) -> Calibration:
    """Measure a device of this machine for so many seconds in a separate process; write the result.

    `device` is `cpu` or a GPU by torch's name, such as `cuda:0`. With `probes` the budget is small
    and the calibration's mode is few-shot. A measurement that was interrupted continues. `powercap`
    is where the CPU's energy counters are.

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
            f"--budget: got {budget_s:g}; allowed with --probes: {LEAST_BUDGET_S:g} to {MOST_PROBES_S:g} s"
        )
    if not LEAST_BUDGET_S <= budget_s < math.inf:
        raise BadInput(
            f"--budget: got {budget_s:g}; allowed: a finite number, {LEAST_BUDGET_S:g} s or more"
        )
    if not most_drift >= 0:
        raise BadInput(f"--most-drift: got {most_drift:g}; allowed: 0 or more")
    if out.exists() and not out.is_file():  # a folder, a device: it would be replaced
        raise BadInput(f"--out: {out}: is a folder or a device; allowed: a regular file")
    require_space(out, _MOST_BYTES, "--out")
    with _lock(out, wait=False) as lock:
        options = ["--device", device, "--most-drift", str(most_drift), "--powercap", str(powercap)]
        options += ["--mode", "few-shot"] if probes else []
        made = _run(out, budget_s, threads, lock, *options)
        return _with_loop(out, made) if made.device_type == "cpu" else made


def calibrate_and_share(
    device_type: str,
    threads: int,
    settings: Settings,
    *,
    budget_s: float = BUDGET_S,
    most_drift: float = MOST_DRIFT,
    store: str | None = None,
) -> dict[str, Any]:
    """Measure this machine anew, and put the calibration into the cache and the store; a small reference to it.

    The link between its ranks is measured anew too. Raises as `calibrate` does, where the link can't be measured, and
    ServiceUnreachable where the store can't be written (the cache has it then).
    """
    known_type(device_type)
    objects = open_store(
        f"{(store or settings.store).rstrip('/')}/calibrations/{device_type}", settings
    )
    path = cached(threads, settings)
    made = calibrate(
        path, budget_s=budget_s, device=device_type, threads=threads, most_drift=most_drift
    )
    renew_link(settings)
    name = f"{key(threads)}.json"
    objects.put(name, path.read_bytes())
    told = made.model_dump(
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
    return {"calibration": f"{objects.uri}/{name}", **told}


def why_not_here(device_type: str, addresses: Sequence[str]) -> str | None:
    """Why this machine can't measure a device type that a pool has at these addresses; None where it can.

    Raises BadInput for an unknown type.
    """
    known_type(device_type)
    if device_type == EMULATED:
        return "emulated: its time is set, there is nothing to measure"
    if device_type != "cpu":
        return f"{device_type}: GPUs are not measured by this step, but by `trainwright calibrate --device`"
    if not any(address in LOCAL_ADDRESSES for address in addresses):
        return f"{device_type}: at {', '.join(addresses)}, and this is another machine"
    return None


def given(path: Path) -> Calibration:
    """The calibration in a file that a person names. Raises BadInput if it is not one.

    One that was measured with another version of torch has a wider interval, and a notice says so.
    """
    found = load(path, importlib.metadata.version("torch"))
    if (note := found.torch_note()) is not None:
        progress.emit("notice", message=f"{path}: {note}")
    return found


def from_store(uri: str, device_type: str, threads: int, settings: Settings) -> Calibration | None:
    """What another machine like this one left there; None where there is nothing that can be used."""
    try:
        objects = open_store(f"{uri.rstrip('/')}/calibrations/{device_type}", settings)
        name = f"{key(threads)}.json"
        found = parse(objects.get(name), f"{objects.uri}/{name}")
    except FileNotFoundError:
        return None
    except (TrainwrightError, OSError) as error:
        progress.emit("notice", message=f"no calibration is taken from the store: {error}")
        return None
    here = (device_type, processor(), threads, importlib.metadata.version("torch"))
    if (found.device_type, found.processor, found.threads, found.torch) != here:
        progress.emit(
            "notice",
            message=f"{objects.uri}/{name}: is of another processor or torch: not used",
        )
        return None
    progress.emit("notice", message=f"calibration: {objects.uri}/{name}, of {found.created_at}")
    return found


def key(threads: int) -> str:
    """What calibrations must share to be each other's: processor, torch and threads."""
    return f"{machine_key()}-{threads}-threads"


def cached(threads: int, settings: Settings) -> Path:
    """Where this machine's own calibration is kept."""
    return settings.home / "calibrations" / f"cpu-{key(threads)}.json"


def _from_cache(path: Path, *, tell: bool = False) -> Calibration | None:
    """What is there and of use; with `tell`, why what is there is not."""
    if not path.exists():
        return None
    why = None
    try:
        known = load(path)
        if known.torch != (here := importlib.metadata.version("torch")):
            why = f"{path}: was measured with torch {known.torch}, here is {here}"
        elif known.sentinel_drift > MOST_DRIFT and time.time() - path.stat().st_mtime > BUSY_KEPT_S:
            why = f"{path}: the machine was busy when it was measured"
    except BadInput as error:
        why = str(error)
    if why is not None:
        if tell:
            progress.emit("notice", message=f"{why}: measuring again")
        return None
    _tell_if_busy(known)
    return known


def _tell_if_busy(calibration: Calibration) -> None:
    if calibration.sentinel_drift > MOST_DRIFT:
        progress.emit(
            "notice",
            message=f"this machine's speed spread by {100 * calibration.sentinel_drift:.0f} % while it was measured: predictions "
            f"are rough; it is measured again after {BUSY_KEPT_S / 60:.0f} minutes",
        )


@contextlib.contextmanager
def _lock(out: Path, *, wait: bool) -> Iterator[int]:
    """One process at a time measures into a file; yields the lock's descriptor for the measuring process."""
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(locked(out.with_name(f"{out.name}.lock"), wait=wait))
        except BlockingIOError:
            raise RunHeld(
                f"calibrate: another process measures into {out} now; wait for it, or name another --out"
            ) from None
        except OSError as error:
            raise BadInput(f"--out: {out}: can't be written ({error.strerror})") from None
        yield held


def _with_loop(out: Path, calibration: Calibration) -> Calibration:
    """The calibration with what training adds to a step, measured now in a process of its own; written."""
    if missing := [
        name for name in ("safetensors", "tensorboard") if importlib.util.find_spec(name) is None
    ]:
        progress.emit(
            "notice",
            message=f"what training adds to a step is not measured: {' and '.join(missing)} missing (trainwright[train])",
        )
        return calibration
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trainwright-loop-") as name:
        found = Path(name) / "loop.json"
        command = [
            sys.executable,
            "-m",
            "trainwright.tasks.train.worker.measure_loop",
            "--out",
            str(found),
        ]
        command += ["--budget", str(LOOP_S)]
        done = subprocess.run(
            dying_with_parent(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise TrainwrightError(
                f"calibrate: measuring training's loop ended with {done.returncode}: {last[:300]}"
            )
        loop = LoopCost.model_validate_json(found.read_bytes())
    duration_s = calibration.duration_s + time.monotonic() - started
    made = calibration.model_copy(update={"loop": loop, "duration_s": duration_s})
    save(made, out)
    return made


def _run(out: Path, budget_s: float, threads: int, lock: int, *options: str) -> Calibration:
    """Measure in a separate process, which holds the lock too and ends with this one."""
    command = [sys.executable, "-m", "trainwright.estimator.measure.measure_device"]
    command += ["--out", str(out.absolute()), "--budget", str(budget_s), "--threads", str(threads)]
    command += options
    last, failure = "", None
    with subprocess.Popen(
        dying_with_parent(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=(lock,),
    ) as process:
        try:
            for line in process.stderr or ():
                last = line.strip() or last
                told = _told(line)
                if "error" in told:
                    failure = from_document(told["error"])
                elif told:
                    progress.emit("calibrate", **told, budget_s=budget_s)
        except KeyboardInterrupt:
            process.kill()
            raise Interrupted(
                "calibrate: interrupted; started again, it goes on from what it has measured"
            ) from None
        except BaseException:
            process.kill()
            raise
    if failure is not None:
        raise failure
    if process.returncode != 0:
        raise TrainwrightError(
            f"calibrate: the measuring process ended with {process.returncode}: {last[:300]}"
        )
    return load(out)


def _told(line: str) -> dict[str, Any]:
    """A line of the measuring process as it means it: JSON of ours, or a library's words, which are none."""
    try:
        told = json.loads(line)
    except ValueError:
        return {}
    return told if isinstance(told, dict) and ("message" in told or "error" in told) else {}
