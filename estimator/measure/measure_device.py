"""Measures this machine: `python -m trainwright.estimator.measure.measure_device --out FILE --budget S …`. Heavy: torch.

Networks of the benchmark family are built in turn; of each, whole steps are timed, then steps in which every operation is
timed where it stands (so that caches and the allocator are as in training). Of single layers, which tell of operations only, the
whole step is not timed: that leaves time for more of them. The process keeps the memory that it frees, so that no time holds what
the kernel takes to give it again: that is measured by itself. Sentinel kernels run before and after each: all times are told at
the median speed, so that a machine that becomes slower or faster meanwhile does no harm, and their spread is told as drift. What
was measured is kept beside the result until that is complete: a run that was cut short goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import torch  # noqa: TID253 - this is a process of its own

from trainwright.estimator.errors import BusyMachine, TrainwrightError
from trainwright.estimator.fit.step_fit import StepSample, drift, fit, refuse_busy
from trainwright.estimator.machine import processor
from trainwright.estimator.measure.benchmark import BenchmarkNetwork, networks, turn
from trainwright.estimator.measure.messages import say, tell
from trainwright.estimator.measure.power import device_power
from trainwright.estimator.measure.samples import KeptSamples
from trainwright.estimator.memory.freed_memory import first_touch_s_per_byte, keep_freed_memory
from trainwright.estimator.predict.calibration import Calibration, save
from trainwright.estimator.predict.energy import RAPL_ROOT
from trainwright.estimator.predict.machine_speed import Speed
from trainwright.estimator.predict.op_cost import OpSample
from trainwright.estimator.predict.reference import references
from trainwright.estimator.trace.operations import OperationCall
from trainwright.estimator.trace.recorder import Clock, Recorder
from trainwright.estimator.trace.source import ModelDefinition
from trainwright.estimator.trace.training_step import StepSpec, TrainingStep, prepare

_LONGEST_STEP_S, _LONGEST_SINGLE_S = 0.15, 0.08
_SETTLING, _SETTLED_FAULTS = (
    4,
    16,
)  # steps before any is timed, at most; new pages of one whose memory has settled
_TIMED_S, _MOST_TIMED = (
    0.02,
    50,
)  # of steps timed at once: a longer one says as much as many short ones
_CLOCKED_S, _MOST_CLOCKED = 0.04, 12  # of steps whose operations are timed, at least two
_FIT_SHARE = 0.15  # of the budget, for fitting
_READ_COUNT = "aten._local_scalar_dense"  # by which an optimizer reads its step count: no operation of a traced step
Found = TypeVar("Found")
Say = Callable[[str, float], None]
"""What is told meanwhile: a message, and the seconds used so far."""


class Sentinel:
    """Kernels that are always the same: their times say how fast the machine is at the moment.

    The least of some is told: the first find the caches as the network before has left them. Of the sum, which finds none of
    its arrays in a cache and takes the longest, fewer do.
    """

    def __init__(self) -> None:
        self._left, self._right = torch.rand(160, 160), torch.rand(160, 160)
        self._one, self._two, self._sum = (torch.rand(2_000_000) for _ in range(3))
        self._small = torch.rand(4, 4, requires_grad=True)
        self()

    def __call__(self) -> Speed:
        """The least of five of each, of the sum of three."""
        return Speed(
            compute_s=_least_s(self._multiply, 5),
            memory_s=_least_s(self._add, 3),
            calls_s=_least_s(self._chain, 5),
        )

    def _multiply(self) -> None:
        for _ in range(3):
            _ = self._left @ self._right

    def _add(self) -> None:
        torch.add(self._one, self._two, out=self._sum)

    def _chain(self) -> None:
        for _ in range(30):
            self._small.view(16).view(4, 4).mul(2)


def _least_s(kernel: Callable[[], None], times: int) -> float:
    seen = []
    for _ in range(times):
        started = time.perf_counter()
        kernel()
        seen.append(time.perf_counter() - started)
    return min(seen)


def measure(
    budget_s: float,
    threads: int,
    say: Say,
    seed: int = 0,
    kept: KeptSamples | None = None,
    most_drift: float = math.inf,
) -> Calibration:
    """Measure until the budget is used, each family at least once; the calibration.

    `kept` are samples to go on from, and to add to. Raises BusyMachine where the machine's speed spread by more than
    `most_drift` meanwhile.
    """
    torch.set_num_threads(threads)
    started = time.monotonic()
    sentinel = Sentinel()
    done = kept or KeptSamples(None, setting(threads, seed))
    spent, least = done.elapsed_s, len(turn())
    if done.samples:
        say(f"going on after {len(done.samples)} networks", spent)
    for number, network in enumerate(networks(seed)):
        if number < len(done.samples):
            continue
        if done.elapsed_s > (1 - _FIT_SHARE) * budget_s and number >= least:
            break
        torch.manual_seed(number)
        sample = measure_network(network, sentinel)
        done.append(sample, spent + time.monotonic() - started)
        say(f"{len(done.samples)} networks", done.elapsed_s)
    refuse_busy(drift(done.samples), most_drift)
    count = sum(len(one.ops) for one in done.samples)
    say(f"fitting {count} operations of {len(done.samples)} steps", done.elapsed_s)
    made = fit(
        done.samples,
        references(),
        device_type="cpu",
        threads=threads,
        dtype="float32",
        torch=importlib.metadata.version("torch"),
        processor=processor(),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        first_touch_s_per_byte=first_touch_s_per_byte(),
        duration_s=0.0,
    )
    return made.model_copy(update={"duration_s": spent + time.monotonic() - started})


def measure_network(network: BenchmarkNetwork, sentinel: Sentinel) -> StepSample:
    """Time steps of a network, then its operations; its batch is smaller where a step would be too long to be timed often."""
    model = network.build()
    batch = _affordable(network, model)
    step = ready(network, batch, model)
    _settle(step)
    operations = _recorded(step)
    timed = _Timed(sentinel)
    if network.single:
        taken, ops_speed = timed(lambda: _clocked(step))
        ops = _alike(operations, taken)
        seconds, noise, speed = sum(one.count * one.seconds for one in ops), 0.0, ops_speed
    else:
        first_s, speed = timed(lambda: time_steps(step))
        (taken, again_s), ops_speed = timed(lambda: (_clocked(step), time_steps(step)))
        ops = _alike(operations, taken)
        again_s /= ops_speed.slower(
            speed, again_s, sum(one.flops for one in operations), len(operations)
        )
        seconds, noise = math.sqrt(first_s * again_s), abs(math.log(first_s / again_s)) / 2
    return StepSample(
        family=network.family,
        single=network.single,
        batch_size=batch,
        seconds=seconds,
        noise=noise,
        speed=speed,
        ops_speed=ops_speed,
        ops=ops,
    )


class _Timed:
    """Times one thing after another, and says how fast the machine was meanwhile: by the sentinel before and after."""

    def __init__(self, sentinel: Sentinel) -> None:
        self._sentinel, self._before = sentinel, sentinel()

    def __call__(self, work: Callable[[], Found]) -> tuple[Found, Speed]:
        """What the work found, and the speed."""
        found, after = work(), self._sentinel()
        speed, self._before = Speed.median([self._before, after]), after
        return found, speed


def _affordable(network: BenchmarkNetwork, model: torch.nn.Module) -> int:
    """The network's batch size, or the largest power of two whose step is surely short enough to be timed often."""
    least = min(2, network.batch_size)
    longest_s = _LONGEST_SINGLE_S if network.single else _LONGEST_STEP_S
    step = ready(network, least, model)
    for _ in range(
        2
    ):  # the first step prepares much: where even by that the batch is small enough, it will do
        started = time.perf_counter()
        step()
        most = least * longest_s / (time.perf_counter() - started)
        if most >= network.batch_size:
            return network.batch_size
    return max(least, 1 << int(math.log2(max(1.0, most))))


def _settle(step: Callable[[], None]) -> None:
    """Step until the process has the memory that a step needs, and the optimizer its state."""
    for _ in range(_SETTLING):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step()
        if resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < _SETTLED_FAULTS:
            break


def ready(
    network: BenchmarkNetwork, batch_size: int, model: torch.nn.Module | None = None
) -> TrainingStep:
    """A step of a network, of a `model` that has been built or of one that is built now, with an optimizer of its own."""
    built = network.build() if model is None else model
    definition = ModelDefinition(network.build, network.example_batch, network.loss)
    return prepare(StepSpec(definition, {}, None, {"name": network.optimizer}), built, batch_size)


def time_steps(step: Callable[[], None], least_s: float = _TIMED_S) -> float:
    """Seconds of a step: the median of as many as take `least_s` together, each timed alone."""
    seen: list[float] = []
    while not seen or (sum(seen) < least_s and len(seen) < _MOST_TIMED):
        started = time.perf_counter()
        step()
        seen.append(time.perf_counter() - started)
    return statistics.median(seen)


def _recorded(step: Callable[[], None]) -> list[OperationCall]:
    """The operations of a step, in their order."""
    recorder = Recorder()
    with recorder, recorder.record() as recording:
        step()
    return recording.operations


def _clocked(step: Callable[[], None]) -> list[tuple[float, ...]]:
    """Seconds of each operation of a step, in their order, in two steps or more; of more the first, a cold one, is left out."""
    clock, rounds = Clock(), list[list[float]]()
    started = time.perf_counter()
    while len(rounds) < 2 or (
        time.perf_counter() - started < _CLOCKED_S and len(rounds) < _MOST_CLOCKED
    ):
        with clock:
            step()
        rounds.append(clock.seconds())
    return list(zip(*(rounds[1:] if len(rounds) > 2 else rounds), strict=True))


def _alike(
    operations: Sequence[OperationCall], taken: Sequence[Sequence[float]]
) -> tuple[OpSample, ...]:
    """Alike operations of a step as one sample each: the mean over its places of the median over the steps that were timed."""
    groups: dict[
        tuple[str, float, float, tuple[tuple[str, float], ...]], list[tuple[OperationCall, float]]
    ] = {}
    for one, seconds in zip(operations, taken, strict=True):
        if one.kind == _READ_COUNT:
            continue
        key = (one.kind, one.flops, one.bytes, tuple(one.dims.items()))
        groups.setdefault(key, []).append((one, statistics.median_low(seconds)))
    return tuple(
        OpSample(
            kind=members[0][0].kind,
            family=members[0][0].family,
            dtype=members[0][0].dtype,
            flops=members[0][0].flops,
            bytes=members[0][0].bytes,
            dims=members[0][0].dims,
            count=len(members),
            seconds=statistics.fmean(seconds for _, seconds in members),
        )
        for members in groups.values()
    )


def setting(threads: int, seed: int = 0) -> str:
    """What samples must share to be put together."""
    from trainwright.estimator.measure import benchmark, blocks, single_layers
    from trainwright.estimator.trace import operations, recorder

    files = (
        __file__,
        *(one.__file__ for one in (benchmark, blocks, operations, recorder, single_layers)),
    )
    code = b"".join(Path(str(one)).read_bytes() for one in files)
    facts = f"{processor()} {importlib.metadata.version('torch')} {threads} {seed}".encode()
    return hashlib.sha256(code + facts).hexdigest()[:16]


def main() -> int:
    """Measure, write the file; progress, or the error that ended it, as JSON lines on stderr."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--powercap", type=Path, default=RAPL_ROOT)
    parser.add_argument("--most-drift", type=float, required=True)
    given = parser.parse_args()
    keep_freed_memory(large_blocks=True)
    try:
        kept = KeptSamples(given.out.with_name(f"{given.out.name}.samples"), setting(given.threads))
        try:
            made = measure(given.budget, given.threads, say, kept=kept, most_drift=given.most_drift)
            power = device_power("cpu", torch.device("cpu"), given.threads, given.powercap)
            save(made.model_copy(update={"power": power}), given.out)
        except BusyMachine:
            kept.discard()  # the next start measures anew
            raise
    except TrainwrightError as error:
        tell(error=error.document())
        return error.exit_code
    kept.discard()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
