"""Times a network of the benchmark family: its step, and each operation in it. Loads torch.

Operations are timed within a step, so that caches and the allocator are as in training. The step of
a single layer is not timed as a whole, because only its operations are used; that leaves time for
more layers.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence

import torch  # noqa: TID253 - measuring runs in a separate process

from trainwright.estimator.fit.step_fit import StepSample
from trainwright.estimator.measure.networks.benchmark import BenchmarkNetwork
from trainwright.estimator.measure.sentinel import BetweenSentinels, Sentinel
from trainwright.estimator.measure.torch_device import CPU, OperationClock, TorchDevice
from trainwright.estimator.predict.op_cost import OpSample
from trainwright.estimator.trace.operations import OperationCall
from trainwright.estimator.trace.recorder import OperationRecorder
from trainwright.estimator.trace.source import ModelDefinition
from trainwright.estimator.trace.training_step import TrainingStep, TrainingStepSpec, prepare

_LONGEST_STEP_S, _LONGEST_SINGLE_S = 0.15, 0.08
_SETTLING_STEPS = 4  # most steps before the first timed one
_SETTLED_FAULTS = 16  # most new pages in a step whose memory has settled
_TIMED_S, _MOST_TIMED = 0.02, 50  # one long step is as informative as many short ones
_CLOCKED_S, _MOST_CLOCKED = 0.04, 12  # number of steps whose operations are timed; at least two
# An optimizer reads its step count by it; a traced step has no such operation.
_READ_COUNT = "aten._local_scalar_dense"


class OutOfTime(Exception):
    """A network was not measured by the given time."""


def measure_network(
    network: BenchmarkNetwork,
    sentinel: Sentinel,
    device: TorchDevice = CPU,
    until: float = math.inf,
) -> StepSample:
    """Time a network's steps, then the operations in them.

    Uses a smaller batch if a step would be too long to repeat, or too large for the device.
    `until`: a time by `time.monotonic`. Raises OutOfTime before a step that begins after it.
    """
    device.begin()
    model = network.build().to(device.torch)
    batch = _affordable(network, model, device, until)
    step = _until(until, device.finished(ready(network, batch, model, device)))
    _settle(step, device)
    operations = _recorded(step)
    timed = BetweenSentinels(sentinel)
    if network.single:
        taken, ops_speed = timed(lambda: _clocked(step, device))
        ops = _alike(operations, taken)
        seconds, noise, speed = sum(one.count * one.seconds for one in ops), 0.0, ops_speed
    else:
        first_s, speed = timed(lambda: time_steps(step))
        (taken, again_s), ops_speed = timed(lambda: (_clocked(step, device), time_steps(step)))
        ops = _alike(operations, taken)
        flops, calls = sum(one.flops for one in operations), len(operations)
        again_s /= ops_speed.slower(speed, again_s, flops, calls)
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


def ready(
    network: BenchmarkNetwork,
    batch_size: int,
    model: torch.nn.Module | None = None,
    device: TorchDevice = CPU,
) -> TrainingStep:
    """A step of a network with a new optimizer; `model` is an already built one."""
    built = network.build() if model is None else model

    def on_device(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = network.example_batch(size)
        return inputs.to(device.torch), targets.to(device.torch)

    definition = ModelDefinition(network.build, on_device, network.loss)
    spec = TrainingStepSpec(definition, {}, None, {"name": network.optimizer})
    return prepare(spec, built.to(device.torch), batch_size)


def time_steps(step: Callable[[], None], least_s: float = _TIMED_S) -> float:
    """Seconds of a step: the median of steps timed one by one for `least_s` in total."""
    seen: list[float] = []
    while not seen or (sum(seen) < least_s and len(seen) < _MOST_TIMED):
        started = time.perf_counter()
        step()
        seen.append(time.perf_counter() - started)
    return statistics.median(seen)


def _until(until: float, step: Callable[[], None]) -> Callable[[], None]:
    def in_time() -> None:
        if time.monotonic() > until:
            raise OutOfTime
        step()

    return in_time


def _affordable(
    network: BenchmarkNetwork, model: torch.nn.Module, device: TorchDevice, until: float
) -> int:
    """The network's batch size, or the largest power of two whose step is certainly short enough.

    A step's time is at most proportional to its batch. On a GPU, where small steps take as long as
    larger ones, the bound is determined again at each larger batch.
    """
    size, wanted = min(2, network.batch_size), network.batch_size
    longest_s = _LONGEST_SINGLE_S if network.single else _LONGEST_STEP_S
    while True:
        step = _until(until, device.finished(ready(network, size, model, device)))
        for _ in range(2):  # the first step includes preparations, but may already be short enough
            started = time.perf_counter()
            step()
            in_time = size * longest_s / (time.perf_counter() - started)
            most = min(in_time, device.largest_batch(size))
            if most >= wanted:
                return wanted
        larger = max(size, 1 << int(math.log2(max(1.0, most))))
        if larger == size or not device.is_gpu:
            return larger
        size = larger


def _settle(step: Callable[[], None], device: TorchDevice) -> None:
    """Run steps until the process has the memory that a step needs, and the optimizer its state."""
    for _ in range(_SETTLING_STEPS):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        if faults < _SETTLED_FAULTS and not device.is_gpu:
            break


def _recorded(step: Callable[[], None]) -> list[OperationCall]:
    """The operations of a step, in order."""
    recorder = OperationRecorder()
    with recorder, recorder.record() as recording:
        step()
    return recording.operations


def _clocked(step: Callable[[], None], device: TorchDevice) -> list[tuple[float, ...]]:
    """Seconds of each operation of a step, in order, for two or more steps.

    If there are more than two, the first is left out, because its caches were cold.
    """
    clock, rounds = OperationClock(device), list[list[float]]()
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
    """One sample for similar operations of a step: the mean of their medians over steps."""
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
