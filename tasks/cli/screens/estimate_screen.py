"""Shows an estimate of a training step to a person, with the reasons for its interval."""

from __future__ import annotations

from typing import Any

from trainwright.estimator.devices import HOST_MEMORY_TYPES
from trainwright.estimator.machine import MOST_DRIFT, processor
from trainwright.estimator.predict.calibration import Calibration
from trainwright.estimator.structure import Structure
from trainwright.infra.memory_limit import usable_memory_bytes
from trainwright.tasks import units
from trainwright.tasks.cli.screens import console

_NAMED = 5  # operations in a list
_MORE = 1.25  # if operations widen the interval by more than this factor, the screen says so


def show_estimate(
    model: str,
    document: dict[str, Any],
    measured: Calibration | None,
    structure: Structure,
    *,
    learned: bool,
) -> None:
    """The document of `estimate`. `learned`: finished runs of a store were asked for."""
    memory = document["peak_memory_bytes"]
    facts = [
        ("mode", f"{document['mode']}, coverage {100 * document['coverage']:.0f} %"),
        *_never_met(document),
        *(_measured_on(measured) if measured is not None else []),
        *[("note", note) for note in document["notes"]],
        *(
            [("corrected by", units.counted(document["learned_from"], "finished run"))]
            if learned
            else []
        ),
        ("step time", units.interval(document["step_time_s"], units.seconds)),
        *[
            (f"  {phase.replace('_', ' ')}", units.seconds(value))
            for phase, value in (document["compute_s"] or {}).items()
        ],
        *(doubts(measured, structure, document) if measured is not None else []),
        (
            "peak memory",
            f"{units.size(memory['expected'])}  (safe: {units.size(memory['safe'])})",
        ),
        *_too_large(document),
        (
            "energy per step",
            units.interval(document["energy_j"], lambda value: units.amount(value, "J")),
        ),
        ("source of power", str(document["energy_source"])),
    ]
    console.facts(f"{model} at batch {document['batch_size']}: median (90 % interval)", facts)


def _measured_on(calibration: Calibration) -> list[tuple[str, str]]:
    version = calibration.measured_torch or calibration.torch
    threads = f"{units.counted(calibration.threads, 'thread')}, torch {version}"
    other = calibration.device_type == "cpu" and calibration.processor != processor()
    here = f"; this machine has {processor()}" if other else ""
    return [("measured on", f"{calibration.processor}, {threads}{here}")]


def _never_met(document: dict[str, Any]) -> list[tuple[str, str]]:
    """The operations that calibration has not measured, most expensive first."""
    names = document["unknown_operations"]
    more = f" and {len(names) - _NAMED} more (--json lists all)" if len(names) > _NAMED else ""
    return [("never measured", ", ".join(names[:_NAMED]) + more)] if names else []


def doubts(
    measured: Calibration, structure: Structure, document: dict[str, Any]
) -> list[tuple[str, str]]:
    """The reason for the width of the interval, and a warning if the machine drifted."""
    lines = []
    if not document["learned_from"]:  # otherwise finished runs determine it
        uncertainty = measured.uncertainty(structure, document["batch_size"])
        steps, all_of_it = 100 * (uncertainty.steps_factor - 1), 100 * (uncertainty.high_factor - 1)
        words = f"steps differ by {steps:.0f} % from the sum of their operations"
        if all_of_it > _MORE * steps:
            words += f"; with operations unlike the measured ones by {all_of_it:.0f} %"
        lines.append(("its interval", words))
    if measured.sentinel_drift > MOST_DRIFT:
        allowed = f"more than the {100 * MOST_DRIFT:.0f} % that can be corrected; calibrate again"
        lines.append(
            (
                "drift of the machine",
                f"{100 * measured.sentinel_drift:.0f} % during calibration: {allowed}",
            )
        )
    return lines


def _too_large(document: dict[str, Any]) -> list[tuple[str, str]]:
    """A warning if a rank may need more memory than the device (for a CPU: this machine) has."""
    needed, has, what = (
        document["device_memory_bytes"],
        document["memory_limit_bytes"],
        document["device_type"],
    )
    if has is None and what in HOST_MEMORY_TYPES:
        has, what = usable_memory_bytes(), "this machine"
    if has is None or needed <= has:
        return []
    return [
        (
            "does not fit",
            f"up to {units.size(needed)}, including the process; {what} has {units.size(has)}",
        )
    ]
