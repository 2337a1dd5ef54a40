"""Commands on a model or a device, without a run: extract, calibrate, estimate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trainwright.estimator.errors import BadInput
from trainwright.estimator.machine import MOST_DRIFT
from trainwright.estimator.named_file import read_named
from trainwright.tasks.cli.options import Debug, Json, print_json, print_model, require_there


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
        int | None, typer.Option(help="micro-batches per step", show_default="1")
    ] = None,
    depth: Annotated[int, typer.Option(min=0, help="levels of nested modules in the table")] = 3,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Read a model's structure from its code, without allocating its memory."""
    from trainwright.tasks.cli.screens import console

    with console.working("tracing a training step"):
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
    """The structure of a model's source, or the one in a file; options must agree with the file."""
    from trainwright.estimator.structure import Structure
    from trainwright.tasks.extract import extract_model
    from trainwright.tasks.settings import Settings
    from trainwright.tasks.spec.documents import parse_value, parsed, validated
    from trainwright.tasks.spec.job import ModelSpec
    from trainwright.tasks.spec.train_spec import Optimizer

    if model.endswith(".json"):
        known = parsed(Structure, read_named(model), model)
        if config:
            raise BadInput(
                f"--config: got {config[0]!r}; {model} is a structure already; "
                "leave the option out, or pass the model's source"
            )
        given = {"optimizer": optimizer, "precision": precision, "accumulation": accumulation}
        for name, value in given.items():
            if value is not None and value != getattr(known, name):
                raise BadInput(
                    f"--{name}: got {value!r}; "
                    f"{model} was extracted with {getattr(known, name)!r}; "
                    f"extract it again with --{name} {value}"
                )
        return known
    arguments: dict[str, Any] = {}
    for one in config or []:
        name, equals, value = one.partition("=")
        if not equals or not name.isidentifier():
            raise BadInput(f"--config: got {one!r}; allowed: name=value")
        arguments[name] = parse_value(value, f"--config {name}")
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
        Path, typer.Option("--out", metavar="FILE", help="file to write the calibration to")
    ],
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="how long to measure; the rest of the command takes about 25 s more",
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
            help="highest drift of the machine's speed, (p90 - p10) / median; above it, fail"
        ),
    ] = MOST_DRIFT,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure this machine, the link between its ranks, and passes of pipelines, for estimates.

    An interrupted measurement continues when the command is started again.
    """
    from trainwright.estimator.predict.calibration import is_calibration
    from trainwright.tasks import progress, units
    from trainwright.tasks.cli.output import check_output
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.estimate.calibrate import calibrate as measure
    from trainwright.tasks.estimate.link import renew_link
    from trainwright.tasks.estimate.passes import renew_passes
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
        with console.err.status("measuring the link between ranks and passes of pipelines"):
            renew_link(Settings.from_environment())
            renew_passes(Settings.from_environment())
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
            "costs from",
            f"these measurements and the reference of {result.reference}"
            if result.reference
            else "these measurements",
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
        ("duration", units.seconds(result.duration_s)),
        ("written to", str(out)),
    ]
    console.facts("calibration", facts)


def estimate(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="path/to/model.py, package.module or structure.json"),
    ],
    batch_size: Annotated[int, typer.Option("--batch-size", help="samples per step")],
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
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.cli.screens.estimate_screen import show_estimate
    from trainwright.tasks.estimate.calibrate import given
    from trainwright.tasks.estimate.step import device_type_of, estimate_step
    from trainwright.tasks.settings import Settings

    if calibration is None and device_type is None:
        raise BadInput("estimate: pass --calibration FILE or --device-type NAME")
    if batch_size < 1:
        raise BadInput(f"--batch-size: got {batch_size}; allowed: 1 or more")
    settings = Settings.from_environment()
    require_there(store, settings)
    with console.working("tracing the model, predicting"):
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
    show_estimate(model, document, measured, structure, learned=store is not None)
