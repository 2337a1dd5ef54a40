"""Probes a device: `python -m trainwright.estimator.measure.probe --out FILE --budget S --device cpu …`. Heavy: torch.

Every template (`estimator.templates`) is built at sizes from where calls dominate to where a run takes some 20 ms; then all are
timed in rounds, each in an order of its own, until the budget is used. The spread of the rounds is told as drift.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import random
import statistics
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import torch  # noqa: TID253 - this is a process of its own

from trainwright.estimator.devices import recognise
from trainwright.estimator.errors import BadInput, TrainwrightError
from trainwright.estimator.fit.few_shot import Probe, ProbeOp, fit_few
from trainwright.estimator.fit.step_fit import refuse_busy
from trainwright.estimator.machine import processor
from trainwright.estimator.measure.measure_device import Say, Sentinel
from trainwright.estimator.measure.messages import say, tell
from trainwright.estimator.measure.power import device_power
from trainwright.estimator.measure.templates import STEPS, TEMPLATES, Call
from trainwright.estimator.memory.freed_memory import first_touch_s_per_byte, keep_freed_memory
from trainwright.estimator.predict.calibration import Calibration, save
from trainwright.estimator.predict.energy import RAPL_ROOT
from trainwright.estimator.quantiles import quantile
from trainwright.estimator.trace.recorder import Recorder

_LONGEST_S = 0.012  # where a device of any kind works from its memory, not from its caches
_MOST_RUNGS = 7
_BUILD_SHARE = 0.6  # of the budget, for building: a slow device gets fewer sizes
_FIT_S = 2.0  # of the budget, for fitting
_LEAST_ROUNDS = 2


def probe(
    budget_s: float,
    device: str,
    threads: int,
    say: Say,
    seed: int = 0,
    most_drift: float = math.inf,
) -> Calibration:
    """A few-shot calibration of a device that torch can address, within so many seconds (each template at least twice).

    Raises BadInput where torch has no such device, or its type is not known, BusyMachine where the rounds spread by more than
    `most_drift`.
    """
    started = time.monotonic()
    torch.set_num_threads(threads)
    where, device_type, name = _device(device)
    built = _build(where, budget_s, started)
    say(f"{len(built)} probes of {len(TEMPLATES)} templates built", time.monotonic() - started)
    rounds: list[list[float]] = []
    draw = random.Random(seed)
    last_s = 0.0
    while len(rounds) < _LEAST_ROUNDS or time.monotonic() - started + last_s + _FIT_S < budget_s:
        order, begun = list(range(len(built))), time.monotonic()
        draw.shuffle(order)
        taken = {number: timed(built[number][1], where) for number in order}
        rounds.append([taken[number] for number in range(len(built))])
        last_s = time.monotonic() - begun
        say(f"round {len(rounds)}", time.monotonic() - started)
    seconds = [statistics.median(values) for values in zip(*rounds, strict=True)]
    speeds = [
        statistics.fmean(one / usual for one, usual in zip(values, seconds, strict=True))
        for values in rounds
    ]
    drift = quantile(speeds, 0.9) - quantile(speeds, 0.1)
    refuse_busy(drift, most_drift)
    return fit_few(
        [
            Probe(template=template, step=template in STEPS, seconds=taken_s, ops=ops)
            for (template, _, ops), taken_s in zip(built, seconds, strict=True)
        ],
        device_type=device_type,
        threads=threads,
        dtype="float32",
        torch=importlib.metadata.version("torch"),
        processor=name,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        duration_s=time.monotonic() - started,
        speed=Sentinel()(),
        first_touch_s_per_byte=first_touch_s_per_byte() if device_type == "cpu" else 0.0,
        sentinel_drift=drift,
    )


def _device(given: str) -> tuple[torch.device, str, str]:
    """The device, its type, and the name that its driver gives it."""
    if given == "cpu":
        return torch.device("cpu"), "cpu", processor()
    there = (
        [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else []
    )
    if given not in there:
        raise BadInput(f"--device: got {given!r}; torch finds here: {', '.join(['cpu', *there])}")
    facts = torch.cuda.get_device_properties(torch.device(given))
    found = recognise(facts.name, facts.total_memory)
    if found is None:
        raise BadInput(f"--device: {given} is a {facts.name!r}, which is no known device type")
    return torch.device(given), found, facts.name


def _build(
    where: torch.device, budget_s: float, started: float
) -> list[tuple[str, Call, tuple[ProbeOp, ...]]]:
    """Every template's ladder, up to where a run takes long; the lowest rungs of all first, so that none is left out."""
    built: list[tuple[str, Call, tuple[ProbeOp, ...]]] = []
    open_templates = dict(TEMPLATES)
    for rung in range(_MOST_RUNGS):
        for name, template in list(open_templates.items()):
            if rung > 1 and time.monotonic() - started > _BUILD_SHARE * budget_s:
                return built
            call = template(rung, where)
            ops = _recorded(call)
            built.append((name, call, ops))
            if timed(call, where) > _LONGEST_S:
                del open_templates[name]
    return built


def _recorded(call: Call) -> tuple[ProbeOp, ...]:
    """What a call runs, once its optimizer's state is there."""
    call()
    recorder = Recorder()
    with recorder, recorder.record() as recording:
        call()
    alike = Counter(
        (one.kind, one.family, one.flops, one.bytes, tuple(one.dims.items()))
        for one in recording.operations
    )
    return tuple(
        ProbeOp(kind=kind, family=family, flops=flops, bytes=moved, dims=dict(dims), count=count)
        for (kind, family, flops, moved, dims), count in alike.items()
    )


def timed(call: Call, where: torch.device) -> float:
    """Seconds of a call: the least of up to three, after one that warms the caches, each until the device is done.

    What else runs on the machine only adds: on one thread of a CPU its own time is taken, which is that of a core of one's own.
    """
    clock = (
        time.thread_time
        if where.type == "cpu" and torch.get_num_threads() == 1
        else time.perf_counter
    )
    call()
    seen: list[float] = []
    while len(seen) < 3 and sum(seen) < _LONGEST_S:
        _finish(where)
        started = clock()
        call()
        _finish(where)
        seen.append(clock() - started)
    return min(seen)


def _finish(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def main() -> int:
    """Probe, write the file, print progress as JSON lines on stderr; bad input is named in the last line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--most-drift", type=float, required=True)
    parser.add_argument("--powercap", type=Path, default=RAPL_ROOT)
    given = parser.parse_args()
    keep_freed_memory(large_blocks=True)
    try:
        made = probe(given.budget, given.device, given.threads, say, most_drift=given.most_drift)
        power = device_power(
            made.device_type, torch.device(given.device), given.threads, given.powercap
        )
        save(made.model_copy(update={"power": power}), given.out)
    except TrainwrightError as error:
        tell(error=error.document())
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
