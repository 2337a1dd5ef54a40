"""What is measured of this machine: its devices, and the link between its ranks.

At the first use; then kept under the trainwright home, by processor, threads and torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

from pydantic import ValidationError

from trainwright.estimator.calibration import Calibration, load
from trainwright.estimator.communication import Link
from trainwright.estimator.energy import RAPL_ROOT
from trainwright.estimator.measure_link import measure_link
from trainwright.estimator.measure_link import save as save_link
from trainwright.infra.process import dying_with_parent
from trainwright.tasks import progress
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.settings import settings

FIRST_USE_S = 35.0
BUDGET_S = 90.0
PROBES_S = 20.0
LEAST_BUDGET_S = 1.0
MOST_PROBES_S = 30.0
LINK_S = 1.5
"""Loading torch in two processes comes on top: the whole is to stay below 6 s."""


def calibration_for(threads: int) -> Calibration:
    """This machine's calibration for a number of CPU threads, from the cache or measured now (under a minute)."""
    version = importlib.metadata.version("torch")
    path = settings().home / "calibrations" / f"cpu-{_machine(version)}-{threads}-threads.json"
    if path.exists():
        try:
            return load(path, version)
        except BadInput as error:
            progress.emit("notice", message=f"{error}: measuring again")
    progress.emit(
        "notice", message=f"measuring this machine ({threads} thread(s)), once, for about {FIRST_USE_S:.0f} s"
    )
    return calibrate(path, budget_s=FIRST_USE_S, threads=threads)


def link_for_this_machine() -> Link:
    """The link between ranks of this machine, from the cache or measured now (under 6 s).

    Raises TrainwrightError where it can't be measured.
    """
    path = settings().home / "links" / f"cpu-{_machine(importlib.metadata.version('torch'))}.json"
    if path.exists():
        try:
            return Link.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            progress.emit("notice", message=f"link: {path}: is not a link, or was cut short: measuring again")
    progress.emit("notice", message=f"measuring all-reduce on this machine, once, for about {LINK_S + 3:.0f} s")
    link = measure_link(budget_s=LINK_S)
    save_link(link, path)
    return link


def calibrate(
    out: Path,
    *,
    budget_s: float | None = None,
    device: str = "cpu",
    threads: int = 1,
    probes: bool = False,
    powercap: Path = RAPL_ROOT,
) -> Calibration:
    """Measure a device of this machine for so many seconds, in a process of its own, and write the calibration.

    With `probes` a few-shot one, of any device that torch can address; else one of networks, of the CPU. `powercap` is where
    the CPU's energy counters are. Raises BadInput for what can't be measured or written.
    """
    budget_s = budget_s if budget_s is not None else PROBES_S if probes else BUDGET_S
    if not probes and device != "cpu":
        raise BadInput(f"--device: got {device!r}; allowed: cpu (with --probes also cuda:0 and its like)")
    if not 1 <= threads <= 1024:
        raise BadInput(f"--threads: got {threads}; allowed: 1 to 1024")
    if probes and not LEAST_BUDGET_S <= budget_s <= MOST_PROBES_S:
        raise BadInput(f"--budget: got {budget_s:g}; allowed with --probes: {LEAST_BUDGET_S:g} to {MOST_PROBES_S:g} s")
    if not budget_s >= LEAST_BUDGET_S:
        raise BadInput(f"--budget: got {budget_s:g}; allowed: {LEAST_BUDGET_S:g} s or more")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out: {out}: can't be written ({error.strerror})") from None
    if out.is_dir():
        raise BadInput(f"--out: {out}: is a folder; allowed: a file")
    command = [sys.executable, "-m", f"trainwright.estimator.{'probe' if probes else 'measure'}"]
    command += ["--out", str(out.absolute()), "--budget", str(budget_s), "--threads", str(threads)]
    command += ["--powercap", str(powercap), *(["--device", device] if probes else [])]
    _run(command)
    return load(out)


def _run(command: list[str]) -> None:
    """Run a measuring process and pass on what it says. Raises BadInput where it names some, TrainwrightError where it fails."""
    last = ""
    with subprocess.Popen(
        dying_with_parent(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            for line in process.stderr or ():
                last = line.strip() or last
                if line.startswith('{"message"'):
                    progress.emit("calibrate", message=json.loads(line)["message"])
        except BaseException:
            process.kill()
            raise
    if process.returncode == BadInput.exit_code and last.startswith('{"error"'):
        raise BadInput(json.loads(last)["error"])
    if process.returncode != 0:
        raise TrainwrightError(f"calibrate: the measuring process ended with {process.returncode}: {last[:300]}")


def _machine(torch_version: str) -> str:
    return hashlib.sha256(f"{_processor()} torch {torch_version}".encode()).hexdigest()[:12]


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
