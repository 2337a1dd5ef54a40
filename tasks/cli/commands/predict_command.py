"""The command `predict`: rows of a file, by the stored model of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from trainwright.tasks.cli.options import Debug, Json, Store, print_model


def predict(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="a finished run's id or URI")],
    rows: Annotated[
        str,
        typer.Argument(
            metavar="ROWS",
            help="a .parquet, .csv or .npz file, a folder of parquet files or images; or a URI",
        ),
    ],
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="the predictions, .parquet or .csv")
    ],
    allow_unseen: Annotated[
        bool,
        typer.Option(
            "--allow-unseen", help="also columns without any value that the model is trained on"
        ),
    ] = False,
    store: Store = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict rows with a run's stored model, whose code runs in the sandbox.

    The columns are found by name; the target may be missing, and other columns are ignored.
    """
    from trainwright.tasks import progress, units
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.inference.predict_rows import predict as predict_rows
    from trainwright.tasks.runs.run import resolve
    from trainwright.tasks.settings import Settings

    chosen = resolve(run_id, Settings.from_environment(), store)
    with console.err.status("loading the model") as status:

        def tell(event: progress.Event) -> None:
            if event["event"] == "predict":
                status.update(f"{event['rows']:,} rows")

        with progress.listening(tell):
            found = predict_rows(chosen, rows, out, allow_unseen=allow_unseen)
    if as_json:
        print_model(found)
        return
    unseen = ", ".join(f"{name} in {rows:,} rows" for name, rows in found.unseen.items())
    facts = [
        ("run", f"{found.run}, the model of step {found.model_step}"),
        ("rows", f"{found.rows:,} in {units.seconds(found.duration_s)}"),
        ("columns", ", ".join(found.columns)),
        *([("ignored columns", ", ".join(found.ignored))] if found.ignored else []),
        *([("unseen values", unseen)] if found.unseen else []),
        ("written to", found.out),
    ]
    console.facts("predictions", facts)
