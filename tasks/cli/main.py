"""The entry point of the command line. The commands are in `tasks.cli.commands`.

Exit codes: 0 done, 1 the work failed, 2 bad input, 3 no feasible plan, 4 a service can't be
reached, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trainwright.estimator.errors import BadInput, TrainwrightError
from trainwright.infra.private_files import keep_private
from trainwright.tasks.cli import pool_commands
from trainwright.tasks.cli.commands import (
    doctor_command,
    export_command,
    model_commands,
    plan_commands,
    predict_command,
    recommend_command,
    run_commands,
    runs_command,
    serve_command,
    show_commands,
    stack_commands,
)
from trainwright.tasks.cli.options import print_json

INTERRUPTED = 130
_NAMES = {"pool_probe": "pool probe"}


class _Commands(TyperGroup):
    """Makes `pool probe` a command, although `pool` takes a file as argument."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] == "pool" and "probe" in args[1:]:
            place = args.index("probe")
            args = ["pool probe", *args[1:place], *args[place + 1 :]]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="trainwright",
    cls=_Commands,
    help="From data and a model to a trained, stored, analysed model, on the devices you have.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"trainwright {version('trainwright')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


for command in (
    run_commands.run,
    plan_commands.validate,
    recommend_command.recommend,
    model_commands.extract,
    model_commands.calibrate,
    model_commands.estimate,
    plan_commands.plan,
    run_commands.search_lr,
    run_commands.train,
    show_commands.replan,
    show_commands.analyze,
    runs_command.runs,
    show_commands.show,
    predict_command.predict,
    export_command.export,
    pool_commands.pool,
    pool_commands.pool_probe,
    doctor_command.doctor,
    stack_commands.up,
    stack_commands.status,
    stack_commands.down,
    serve_command.serve,
):
    app.command(_NAMES.get(command.__name__) or command.__name__.replace("_", "-"))(command)


def main() -> None:
    """Run a command.

    An error gives an exit code and one line on stderr; with --json also a document on stdout.
    """
    wants_json, debug = "--json" in sys.argv, "--debug" in sys.argv
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    keep_stdout()
    keep_private()
    try:
        code = app(prog_name="trainwright", standalone_mode=False)
        if code == INTERRUPTED:  # typer returns this on Ctrl-C
            raise KeyboardInterrupt
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except TrainwrightError as error:
        _fail(error, wants_json, debug)
    except (KeyboardInterrupt, typer.Abort):
        from trainwright.tasks.errors import Interrupted

        _fail(Interrupted("interrupted"), wants_json, debug)
    except BrokenPipeError:
        _drop_stdout()  # the reader of our output has exited
        sys.exit(1)
    except typer.Exit as error:
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001 - outermost boundary: reports; --debug shows where
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            _drop_stdout()
            error = TrainwrightError(
                f"standard output or another open file: can't be written ({error.strerror})"
            )
            _fail(error, False, debug)
        if isinstance(error, PermissionError) and error.filename is not None:
            _fail(
                BadInput(
                    f"{error.filename}: the user {os.geteuid()} may not use it; allowed: files and "
                    "runs of this user, or of a store that is shared with it"
                ),
                wants_json,
                debug,
            )
        usage = _usage(error)
        if usage == "":  # without a command: typer has shown the help
            sys.exit(BadInput.exit_code)
        known = (
            BadInput(usage)
            if usage
            else TrainwrightError(f"{type(error).__name__}: {error} (--debug shows where)")
        )
        _fail(known, wants_json, debug)


def keep_stdout() -> None:
    """Keep stdout for what Python prints; what C code writes there goes to stderr.

    HiGHS, as scipy 1.17 has it, reports some solutions there, which would break a JSON document.
    """
    with contextlib.suppress(OSError, AttributeError):  # one of them is closed
        printed, kept = sys.stdout, os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), printed.fileno())
        lines = 1 if printed.line_buffering else -1
        sys.stdout = os.fdopen(kept, "w", lines, encoding=printed.encoding, errors=printed.errors)


def _usage(error: Any) -> str | None:
    """What a usage error of typer says; None for other errors."""
    from pydantic import ValidationError

    from trainwright.tasks.spec.documents import one_line

    if isinstance(error.__cause__, ValidationError) and getattr(error, "param", None):
        return f"{error.param.opts[-1]}: {one_line(error.__cause__)}"
    return str(error.format_message()) if hasattr(error, "format_message") else None


def _drop_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: TrainwrightError, wants_json: bool, debug: bool) -> None:
    from trainwright.tasks.errors import final_state

    if debug:
        traceback.print_exc()
    if wants_json:
        document: dict[str, Any] = {"error": error.document()}
        if error.kind == "infeasible":
            document["feasible"] = False
        if error.run is not None:
            document |= {"run": error.run, "state": final_state(error)}
        try:
            print_json(document)
        except (TrainwrightError, BrokenPipeError):
            _drop_stdout()  # standard output can't be written; the line below reports the error
    line = "".join(
        one if one.isprintable() else " " if one.isspace() else "?" for one in str(error)
    )
    # One line, whatever a file's name or a model's message contains.
    print("trainwright:", line, file=sys.stderr)  # noqa: T201
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
