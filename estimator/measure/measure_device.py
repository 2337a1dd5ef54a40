"""Measures a device of this machine: `python -m trainwright.estimator.measure.measure_device …`.

Networks of the benchmark family are built in turn, on the CPU or a GPU, and timed
(`network_timing`) until the budget is used. Sentinel kernels run before and after each: all times
are normalised to the median speed, so that changes of the machine's speed do no harm; the spread of
the speed is reported as drift. The process keeps the memory that it frees, so that no time includes
the kernel's time to provide pages again; that is measured separately (`first_touch_s_per_byte`).

Samples are stored beside the result until it is complete, so that an interrupted measurement can
continue. Loads torch.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import math
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch  # noqa: TID253 - this is a separate process

from trainwright.estimator.errors import BusyMachine, TrainwrightError
from trainwright.estimator.fit.step_fit import drift, fit, refuse_busy
from trainwright.estimator.measure.energy_meter import RAPL_ROOT
from trainwright.estimator.measure.network_timing import OutOfTime, measure_network
from trainwright.estimator.measure.networks.benchmark import FAMILIES, networks
from trainwright.estimator.measure.power import device_power
from trainwright.estimator.measure.samples import KeptSamples
from trainwright.estimator.measure.sentinel import Sentinel
from trainwright.estimator.measure.torch_device import TorchDevice, device_named
from trainwright.estimator.memory.freed_memory import first_touch_s_per_byte, keep_freed_memory
from trainwright.estimator.predict.calibration import Calibration, save
from trainwright.estimator.predict.reference import references

_FIT_SHARE = 0.15  # of the budget
_EACH_ONCE_S = 15.0  # how long a smaller budget may last until each family was measured
_GPU_GROWTH = (1, 8, 64)  # factors on batch sizes: a GPU needs far more samples to be busy
_MEASURING = (
    "measure.networks.benchmark",
    "measure.networks.image_networks",
    "measure.networks.parts",
    "measure.networks.sequence_networks",
    "measure.networks.single_layers",
    "measure.network_timing",
    "measure.sentinel",
    "measure.torch_device",
    "trace.operations",
    "trace.recorder",
    "trace.training_step",
)
Say = Callable[[str, float], None]
"""Reports progress: a message, and the seconds used so far."""


def measure(
    device: TorchDevice,
    budget_s: float,
    threads: int,
    say: Say,
    seed: int = 0,
    kept: KeptSamples | None = None,
    most_drift: float = math.inf,
) -> Calibration:
    """Measure a device until the budget is used.

    A small budget lasts until each network family was measured once, but on a busy machine no
    longer than `_EACH_ONCE_S`. `kept` has the samples so far, and gets the new ones. Raises
    BusyMachine if the machine's speed spread by more than `most_drift` meanwhile.
    """
    torch.set_num_threads(threads)
    started = time.monotonic()
    sentinel = Sentinel(device)
    done = kept or KeptSamples(None, setting(device, threads, seed))
    spent, least = done.elapsed_s, len(FAMILIES)
    if done.samples:
        say(f"continuing after {len(done.samples)} networks", spent)
    for number, network in enumerate(networks(seed, _GPU_GROWTH if device.is_gpu else (1,))):
        if number < len(done.samples):
            continue
        fits = any(not sample.single for sample in done.samples)
        last_s = max((1 - _FIT_SHARE) * budget_s, _EACH_ONCE_S if number < least else 0.0)
        if fits and done.elapsed_s > last_s:
            break
        torch.manual_seed(number)
        until = started - spent + max(budget_s, _EACH_ONCE_S) if fits else math.inf
        try:
            sample = measure_network(network, sentinel, device, until)
        except OutOfTime:
            break
        done.append(sample, spent + time.monotonic() - started)
        say(f"{len(done.samples)} networks", done.elapsed_s)
    refuse_busy(drift(done.samples), most_drift)
    count = sum(len(one.ops) for one in done.samples)
    say(f"fitting {count} operations of {len(done.samples)} steps", done.elapsed_s)
    made = fit(
        done.samples,
        () if device.is_gpu else references(),
        device_type=device.device_type,
        threads=threads,
        dtype="float32",
        torch=importlib.metadata.version("torch"),
        processor=device.name,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        first_touch_s_per_byte=0.0 if device.is_gpu else first_touch_s_per_byte(),
        duration_s=0.0,
    )
    return made.model_copy(update={"duration_s": spent + time.monotonic() - started})


def setting(device: TorchDevice, threads: int, seed: int = 0) -> str:
    """What samples must have in common to be used together: the measuring code and the machine."""
    modules = [sys.modules[f"trainwright.estimator.{name}"] for name in _MEASURING]
    code = b"".join(Path(str(one.__file__)).read_bytes() for one in modules)
    facts = f"{device.name} {importlib.metadata.version('torch')} {threads} {seed}".encode()
    return hashlib.sha256(code + facts).hexdigest()[:16]


def tell(**what: object) -> None:
    """Write a message for the process that started this one: one line of JSON on stderr."""
    sys.stderr.write(json.dumps(what) + "\n")
    sys.stderr.flush()


def say(message: str, elapsed_s: float) -> None:
    """Report progress."""
    tell(message=message, elapsed_s=elapsed_s)


def main() -> int:
    """Measure and write the file; progress, or the error, as JSON lines on stderr."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--mode", choices=("calibrated", "few-shot"), default="calibrated")
    parser.add_argument("--powercap", type=Path, default=RAPL_ROOT)
    parser.add_argument("--most-drift", type=float, required=True)
    given = parser.parse_args()
    keep_freed_memory(large_blocks=True)
    try:
        device = device_named(given.device)
        samples = given.out.with_name(f"{given.out.name}.samples")
        kept = KeptSamples(samples, setting(device, given.threads))
        try:
            made = measure(
                device, given.budget, given.threads, say, kept=kept, most_drift=given.most_drift
            )
            power = device_power(device, given.threads, given.powercap)
            save(made.model_copy(update={"mode": given.mode, "power": power}), given.out)
        except BusyMachine:
            kept.discard()  # the next start measures again
            raise
    except TrainwrightError as error:
        tell(error=error.document())
        return error.exit_code
    kept.discard()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
