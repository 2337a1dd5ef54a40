"""Measures this machine as a reference for others (`predict.reference`). Loads torch.

`python -m trainwright.estimator.measure.measure_reference --out FILE` measures networks of several
seeds other than a calibration's own seed, and fits one calibration to all of them, without a
reference. Samples are stored beside FILE, so that an interrupted measurement can continue. The
files in the package were made with `--seeds 11 12 13 --seconds 200`, one thread, alone on the
machine.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import time
from datetime import UTC, datetime
from pathlib import Path

import torch  # noqa: TID253 - this is a separate process

from trainwright.estimator.fit.step_fit import StepSample, fit
from trainwright.estimator.machine import processor
from trainwright.estimator.measure.measure_device import say, setting
from trainwright.estimator.measure.network_timing import measure_network
from trainwright.estimator.measure.networks.benchmark import networks
from trainwright.estimator.measure.samples import KeptSamples
from trainwright.estimator.measure.sentinel import Sentinel
from trainwright.estimator.measure.torch_device import CPU
from trainwright.estimator.memory.freed_memory import first_touch_s_per_byte, keep_freed_memory
from trainwright.estimator.predict.calibration import Calibration

_LIKELIHOOD_POINTS = 400
_CALIBRATIONS_OWN = 0
"""The seed of a calibration's networks, which show whether a reference helps."""


def measured(seed: int, seconds: float, kept: KeptSamples, sentinel: Sentinel) -> list[StepSample]:
    """Samples of a seed's networks, measured for `seconds`."""
    started, spent = time.monotonic(), kept.elapsed_s
    for number, network in enumerate(networks(seed)):
        if kept.elapsed_s >= seconds:
            break
        if number >= len(kept.samples):
            torch.manual_seed(number)
            kept.append(measure_network(network, sentinel), spent + time.monotonic() - started)
    return kept.samples


def main() -> None:
    """Measure, fit, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    parser.add_argument("--seconds", type=float, default=200.0, help="for each seed")
    given = parser.parse_args()
    if _CALIBRATIONS_OWN in given.seeds:
        parser.error(f"--seeds: {_CALIBRATIONS_OWN} is the seed of calibrations")
    keep_freed_memory(large_blocks=True)
    torch.set_num_threads(1)
    sentinel, samples, started = Sentinel(), list[StepSample](), time.monotonic()
    for seed in given.seeds:
        kept = KeptSamples(
            given.out.with_name(f"{given.out.name}.{seed}.samples"), setting(CPU, 1, seed)
        )
        samples += measured(seed, given.seconds, kept, sentinel)
        say(f"{len(samples)} networks", time.monotonic() - started)
    made = fit(
        samples,
        likelihood_points=_LIKELIHOOD_POINTS,
        device_type="cpu",
        threads=1,
        dtype="float32",
        torch=importlib.metadata.version("torch"),
        processor=processor(),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        first_touch_s_per_byte=first_touch_s_per_byte(),
        duration_s=len(given.seeds) * given.seconds,
    )
    given.out.write_bytes(gzip.compress(_rounded(made).model_dump_json().encode(), mtime=0))


def _rounded(made: Calibration) -> Calibration:
    """The calibration with as many digits as are significant."""
    families = {
        name: cost.model_copy(
            update={"weights": tuple(float(f"{one:.5g}") for one in cost.weights)}
        )
        for name, cost in made.families.items()
    }
    return made.model_copy(update={"families": families})


if __name__ == "__main__":
    main()
