"""The step of many pipelines at once, pass by pass: what `step_simulator` gives for each of them.

Which pass comes after which depends on the schedule only, so that one order serves for all
pipelines with as many stages, and each end is a numpy array over them. Sums between pipelines and
the step's figures are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from trainwright.tasks.allocate.actions.schedules import StagePass, in_flight, passes_of
from trainwright.tasks.allocate.pipelines.stage_chain import StageChain
from trainwright.tasks.runs.artefacts.layout import StageSchedule


class Division(NamedTuple):
    """A division of a chain among devices: stage s has the units cuts[s - 1] to cuts[s]."""

    devices: tuple[int, ...]
    cuts: tuple[int, ...]
    """the first units of all stages but the first"""

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.devices)


def step_seconds(chain: StageChain, schedule: StageSchedule, divisions: Sequence[Division]) -> Any:
    """Seconds of a step of each division (numpy); infinite if a device's memory does not hold it.

    All divisions have the same number of stages.
    """
    import numpy as np

    if not divisions:
        return np.zeros(0)
    stages = divisions[0].stages
    devices = np.array([one.devices for one in divisions])
    inner = np.array([one.cuts for one in divisions], dtype=int).reshape(len(divisions), stages - 1)
    ends = np.concatenate([inner, np.full((len(divisions), 1), chain.units)], axis=1)
    begins = np.concatenate([np.zeros((len(divisions), 1), dtype=int), inner], axis=1)
    forward, input_gradient, weight_gradient, update = (
        one[..., devices, ends] - one[..., devices, begins] for one in chain.prefixes
    )
    passes = _with_own(
        chain, schedule, devices, begins, ends, (forward, input_gradient, weight_gradient)
    )
    step = _play(chain, schedule, passes, _message_s(chain, devices, inner))
    step += update.max(axis=1)
    return np.where(fits(chain, schedule, devices, begins, ends), step, np.inf)


def _with_own(
    chain: StageChain,
    schedule: StageSchedule,
    devices: Any,
    begins: Any,
    ends: Any,
    passes: tuple[Any, Any, Any],
) -> tuple[Any, Any, Any]:
    """Seconds of passes (size, division, stage) with what they take beside their layers."""
    import numpy as np

    forward, input_gradient, weight_gradient = passes
    stages = devices.shape[1]
    layers = chain.sums(chain.layers)
    layers = layers[ends] - layers[begins]
    crossing = np.pad(chain.crossing_bytes[:, ends[:, :-1] - 1], ((0, 0), (0, 0), (1, 1)))
    messages = np.full(stages, 2.0)
    messages[0] -= 1
    messages[-1] -= 1

    def longer(compute_s: Any, *, sends: bool = True) -> Any:
        return chain.own.longer(
            devices,
            compute_s,
            messages=messages * sends,
            moved_bytes=(crossing[..., 1:] + crossing[..., :-1]) * sends,
            layers=layers,
        )

    if schedule == "zero-bubble":
        weight_gradient = weight_gradient + longer(weight_gradient, sends=False)
        input_gradient = input_gradient + longer(input_gradient)
    else:
        input_gradient = input_gradient + longer(input_gradient + weight_gradient)
    return forward + longer(forward), input_gradient, weight_gradient


def fits(chain: StageChain, schedule: StageSchedule, devices: Any, begins: Any, ends: Any) -> Any:
    """Whether each division fits into the memory of its devices (numpy, booleans)."""
    import numpy as np

    stages = devices.shape[1]
    flight = np.array(
        [in_flight(schedule, stages, stage, chain.micro_batches) for stage in range(stages)]
    )
    state, kept = chain.sums(chain.state_bytes), chain.sums(chain.kept_bytes)
    need = state[ends] - state[begins] + flight * (kept[ends] - kept[begins])
    return (need <= chain.room_bytes[devices] * (1 + 1e-9)).all(axis=1)


def _message_s(chain: StageChain, devices: Any, inner: Any) -> tuple[Any, Any]:
    """Seconds of messages over each cut, forward and back (size, division, cut)."""
    one, other = devices[:, :-1], devices[:, 1:]
    crossing = chain.crossing_bytes[:, inner - 1]
    return (
        chain.latency_s[one, other] + chain.s_per_byte[one, other] * crossing,
        chain.latency_s[other, one] + chain.s_per_byte[other, one] * crossing,
    )


def _play(
    chain: StageChain,
    schedule: StageSchedule,
    passes: tuple[Any, Any, Any],
    messages: tuple[Any, Any],
) -> Any:
    """When the last stage of each division has ended its passes."""
    import numpy as np

    forward, input_gradient, weight_gradient = passes
    forth, back = messages
    count, stages = forward.shape[1:]
    now, sent, returned = np.zeros((stages, count)), dict[int, Any](), dict[int, Any]()
    came: dict[tuple[int, int, bool], Any] = {}
    """by stage, micro-batch, and whether it is a gradient: when the message has come"""
    for stage, one in pass_order(schedule, stages, chain.micro_batches):
        part = one.micro_batch
        size = chain.sizes[part]
        if one.kind == "weight-gradient":
            now[stage] += weight_gradient[size, :, stage]
            continue
        is_forward = one.kind == "forward"
        message = came.pop((stage, part, not is_forward), None)
        begin = now[stage] if message is None else np.maximum(now[stage], message)
        if is_forward:
            end = begin + forward[size, :, stage]
        else:
            end = begin + input_gradient[size, :, stage]
            if one.kind == "backward":
                end = end + weight_gradient[size, :, stage]
        now[stage] = end
        if is_forward and stage + 1 < stages:
            before = sent.get(stage)
            ready = end if before is None else np.maximum(end, before)
            sent[stage] = ready + forth[size, :, stage]
            came[stage + 1, part, False] = sent[stage] + chain.own.delay_s
        elif not is_forward and stage:
            before = returned.get(stage)
            ready = end if before is None else np.maximum(end, before)
            returned[stage] = ready + back[size, :, stage - 1]
            came[stage - 1, part, True] = returned[stage] + chain.own.delay_s
    return now.max(axis=0)


@functools.lru_cache(maxsize=256)
def pass_order(
    schedule: StageSchedule, stages: int, micro_batches: int
) -> tuple[tuple[int, StagePass], ...]:
    """All passes of a pipeline, each after those that it needs."""
    lists = [passes_of(schedule, stages, stage, micro_batches) for stage in range(stages)]
    at, found = [0] * stages, list[tuple[int, StagePass]]()
    done: set[tuple[int, int, bool]] = set()

    def ready(stage: int, one: StagePass) -> bool:
        if one.kind == "weight-gradient":
            return True
        if one.kind == "forward":
            return stage == 0 or (stage - 1, one.micro_batch, True) in done
        return stage + 1 == stages or (stage + 1, one.micro_batch, False) in done

    while len(found) < sum(map(len, lists)):
        for stage, own in enumerate(lists):
            while at[stage] < len(own) and ready(stage, one := own[at[stage]]):
                found.append((stage, one))
                if one.kind != "weight-gradient":
                    done.add((stage, one.micro_batch, one.kind == "forward"))
                at[stage] += 1
    return tuple(found)
