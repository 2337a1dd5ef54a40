"""Commands about a model and a device, without a run: extract, calibrate, estimate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.estimator.errors import BadInput
from trainwright.estimator.machine import MOST_DRIFT, processor
from trainwright.estimator.named_file import read_named
from trainwright.tasks.cli.options import Debug, Json, print_json, print_model, require_there

if TYPE_CHECKING:
    from trainwright.estimator.predict.calibration import Calibration
    from trainwright.estimator.structure import Structure

_NAMED = 5  # operations
_MORE = 1.25  # times the width that steps have: what operations add is worth a word


def extract(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="path/to/model.py or package.module")
    ],
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="samples in the traced step")
    ] = 32,
    config: Annotated[
        list[str] | None, typer.Option("--config", metavar="k=v", help="an argument of build_model")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="sgd, momentum, adam or adamw", show_default="adamw")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="fp32, fp64, bf16, or amp (bf16 where autocast says so)", show_default="fp32"
        ),
    ] = None,
    accumulation: Annotated[
        int | None, typer.Option(help="micro-batches in a step", show_default="1")
    ] = None,
    depth: Annotated[
        int, typer.Option(min=0, help="how deep the table shows modules within modules")
    ] = 3,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Read a model's structure from its code, without allocating it."""
    from trainwright.tasks.cli.screens import console

    with console.err.status("tracing a training step"):
        structure = _structure(model, batch_size, config, optimizer, precision, accumulation)
    if as_json:
        print_model(structure)
        return
    console.layers(structure, depth)


def _structure(
    model: str,
    batch_size: int,
    config: list[str] | None,
    optimizer: str | None,
    precision: str | None,
    accumulation: int | None = None,
) -> Any:
    """What `extract` finds, or a structure.json, with which no option may disagree."""
    from trainwright.estimator.structure import Structure
    from trainwright.tasks.extract import extract_model
    from trainwright.tasks.settings import Settings
    from trainwright.tasks.spec.documents import parse_text, parsed, validated
    from trainwright.tasks.spec.job import ModelSpec, Optimizer

    if model.endswith(".json"):
        known = parsed(Structure, read_named(model), model)
        if config:
            raise BadInput(
                f"--config: got {config[0]!r}; {model} is a structure already: leave it out, or name the source"
            )
        given = {"optimizer": optimizer, "precision": precision, "accumulation": accumulation}
        for name, value in given.items():
            if value is not None and value != getattr(known, name):
                raise BadInput(
                    f"--{name}: got {value!r}; {model} was extracted with {getattr(known, name)!r}: extract anew"
                )
        return known
    arguments: dict[str, Any] = {}
    for one in config or []:
        name, equals, value = one.partition("=")
        if not equals or not name.isidentifier():
            raise BadInput(f"--config: got {one!r}; allowed: name=value")
        arguments |= parse_text(f"{name}: {value}", "--config")
    spec = validated(ModelSpec, {"source": model, "config": arguments}, "model")
    rule = validated(Optimizer, {"name": optimizer or "adamw"}, "--optimizer")
    return extract_model(
        spec,
        Settings.from_environment(),
        batch_size=batch_size,
        optimizer=rule,
        precision="fp32" if precision is None else precision,
        accumulation=1 if accumulation is None else accumulation,
    )


def calibrate(
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="where the calibration is written")
    ],
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="to measure for; what stands around takes some 25 s more",
            show_default="90, with --probes 20",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, or a GPU by torch's name, such as cuda:0")
    ] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads")] = 1,
    probes: Annotated[
        bool,
        typer.Option(
            "--probes", help="measure for a short time: correct the datasheet (mode few-shot)"
        ),
    ] = False,
    most_drift: Annotated[
        float,
        typer.Option(
            help="refuse where the machine's speed spread by more meanwhile: (p90 - p10) / median of its time"
        ),
    ] = MOST_DRIFT,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure this machine and the link between its ranks, so that estimates are of it.

    One that was cut short goes on when it is started again.
    """
    from trainwright.estimator.predict.calibration import is_calibration
    from trainwright.tasks import progress, units
    from trainwright.tasks.cli.output import check_output
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.estimate.calibrate import calibrate as measure
    from trainwright.tasks.estimate.link import renew_link
    from trainwright.tasks.settings import Settings

    check_output(out, "--out", "calibration", is_calibration)
    with console.Countdown(f"measuring {device}") as bar, progress.listening(bar):
        result = measure(
            out,
            budget_s=budget,
            device=device,
            threads=threads,
            probes=probes,
            most_drift=most_drift,
        )
    if not probes:
        with console.err.status("measuring the link between ranks"):
            renew_link(Settings.from_environment())
    if as_json:
        print_model(result, exclude={"families"})
        return
    error = result.cross_validated_error
    facts = [
        ("mode", result.mode),
        ("device", f"{result.device_type}, {result.processor}"),
        ("threads", str(result.threads)),
        ("dtype", result.dtype),
        ("torch", result.torch),
        ("measurements", f"{result.measurements:,} of {len(result.kinds)} kinds of operation"),
        (
            "told by",
            f"these and the reference, of {result.reference}"
            if result.reference
            else "these alone",
        ),
        (
            "drift of the machine",
            f"{100 * result.sentinel_drift:.0f} % (allowed: {100 * most_drift:.0f} %)",
        ),
        (
            "cross-validated error",
            f"median {100 * error.median:.0f} %, p90 {100 * error.p90:.0f} %",
        ),
        (
            "power",
            f"{result.power.idle_w:.1f} W idle, {result.power.load_w:.1f} W"
            if result.power
            else "no meter",
        ),
        ("took", units.seconds(result.duration_s)),
        ("written to", str(out)),
    ]
    console.facts("calibration", facts)


def estimate(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="path/to/model.py, package.module or structure.json"),
    ],
    batch_size: Annotated[int, typer.Option("--batch-size", help="samples in a step")],
    calibration: Annotated[
        Path | None, typer.Option("--calibration", metavar="FILE", help="from `calibrate --out`")
    ] = None,
    device_type: Annotated[
        str | None, typer.Option("--device-type", metavar="NAME", help="a known device type")
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option("--config", metavar="k=v", help="an argument of build_model")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="sgd, momentum, adam or adamw", show_default="adamw")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="fp32, fp64, bf16, or amp (bf16 where autocast says so)", show_default="fp32"
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(metavar="URI", help="a store whose finished runs correct the prediction"),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict time, memory and energy of a training step on a device type."""
    from trainwright.tasks import units
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.estimate.calibrate import given
    from trainwright.tasks.estimate.step import device_type_of, estimate_step
    from trainwright.tasks.settings import Settings

    if calibration is None and device_type is None:
        raise BadInput("estimate: give --calibration FILE or --device-type NAME")
    if batch_size < 1:
        raise BadInput(f"--batch-size: got {batch_size}; allowed: 1 or more")
    settings = Settings.from_environment()
    require_there(store, settings)
    measured = given(calibration) if calibration is not None else None
    device_type_of(device_type, measured)  # before the model is traced
    structure = _structure(model, batch_size, config, optimizer, precision)
    document = estimate_step(
        structure,
        settings,
        batch_size=batch_size,
        device_type=device_type,
        calibration=measured,
        store=store,
    )
    if as_json:
        print_json(document)
        return
    memory = document["peak_memory_bytes"]
    facts = [
        ("mode", f"{document['mode']}, coverage {100 * document['coverage']:.0f} %"),
        *_never_met(document),
        *(_measured_on(measured) if measured is not None else []),
        *[("note", note) for note in document["notes"]],
        *(
            [("corrected by", f"{document['learned_from']} finished run(s)")]
            if store is not None
            else []
        ),
        ("step time", units.interval(document["step_time_s"], units.seconds)),
        *(_doubts(measured, structure, document) if measured is not None else []),
        (
            "peak memory",
            f"{units.size(memory['expected'])}  (safe: {units.size(memory['safe'])})",
        ),
        *_too_large(document),
        (
            "energy of a step",
            units.interval(document["energy_j"], lambda value: units.amount(value, "J")),
        ),
        ("power known from", str(document["energy_source"])),
    ]
    console.facts(f"{model} at batch {batch_size}: median (90 % interval)", facts)


def _measured_on(calibration: Calibration) -> list[tuple[str, str]]:
    version = calibration.measured_torch or calibration.torch
    threads = f"{calibration.threads} thread(s), torch {version}"
    other = calibration.device_type == "cpu" and calibration.processor != processor()
    here = f"; this machine has {processor()}" if other else ""
    return [("measured on", f"{calibration.processor}, {threads}{here}")]


def _never_met(document: dict[str, Any]) -> list[tuple[str, str]]:
    """The operations that calibration has not seen, dearest first."""
    names = document["unknown_operations"]
    more = f" and {len(names) - _NAMED} more (--json names all)" if len(names) > _NAMED else ""
    return [("never measured", ", ".join(names[:_NAMED]) + more)] if names else []


def _doubts(
    measured: Calibration, structure: Structure, document: dict[str, Any]
) -> list[tuple[str, str]]:
    """Where the interval of the step time comes from, and what speaks against the calibration."""
    lines = []
    if not document["learned_from"]:  # else finished runs made it what it is
        about = measured.about(structure, document["batch_size"])
        words = f"steps differ by {100 * (about.steps_factor - 1):.0f} % from what their operations come to"
        if about.high_factor - 1 > _MORE * (about.steps_factor - 1):
            words += (
                f", with operations unlike the measured ones {100 * (about.high_factor - 1):.0f} %"
            )
        lines.append(("its interval", words))
    if measured.sentinel_drift > MOST_DRIFT:
        allowed = (
            f"more than the {100 * MOST_DRIFT:.0f} % that can be corrected for; calibrate again"
        )
        lines.append(
            (
                "drift of the machine",
                f"{100 * measured.sentinel_drift:.0f} % during calibration: {allowed}",
            )
        )
    return lines


def _too_large(document: dict[str, Any]) -> list[tuple[str, str]]:
    """That a rank with this step may need more memory than the device has; of a CPU, than this machine has."""
    from trainwright.estimator.devices import HOST_MEMORY_TYPES
    from trainwright.infra.memory_limit import usable_memory_bytes
    from trainwright.tasks import units

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
            f"up to {units.size(needed)} with the process itself; {what} has {units.size(has)}",
        )
    ]
