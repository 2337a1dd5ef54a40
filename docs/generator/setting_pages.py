"""The pages of the settings and of the exit codes."""

from __future__ import annotations

import inspect
import re

from model_tables import cell

from trainwright.tasks import errors, settings
from trainwright.tasks.errors import TrainwrightError

_SETTINGS = """# Settings

Only entry points read the environment: the command line, operators, the service. Keys and passwords
come from the environment or from Airflow's connections; no job file, log or artefact holds them. In
Airflow, section `[trainwright]` of `airflow.cfg` and connections take the place of the variables
([An Airflow of your own](../how-to/own-airflow.md)).

| variable | default | meaning |
|---|---|---|
"""
_CODES = """# Exit codes and errors

Every command ends with one of these codes. An error is one line on stderr: the field or thing, what
was given, what is allowed or how to mend it. With `--json` there is also one document on stdout:
`{"error": {"kind", "message", …}}`.

| code | meaning |
|---|---|
| 0 | done |
| 1 | the work failed (training failed, data rejected) |
| 2 | bad input |
| 3 | no feasible plan; the message says which limit binds, and the nearest that is feasible |
| 4 | a service (S3 server, store, ledger, host, cluster) can't be reached, refuses the keys, \
or can't be written to; or a program or package is not installed |
| 130 | interrupted; the same command continues |

## Kinds of errors

| kind | code | meaning |
|---|---|---|
"""


def setting_page() -> str:
    """The variables, from the docstring of `tasks/settings.py`."""
    rows = re.findall(
        r"^\| (TRAINWRIGHT_[^|]+) \| ([^|]+) \| ([^|]+) \|$", settings.__doc__ or "", re.M
    )
    lines = (f"| {_code(name)} | {default} | {text} |" for name, default, text in rows)
    return _SETTINGS + "\n".join(lines) + "\n"


def exit_codes() -> str:
    """The exit codes, and the kinds of errors from `tasks/errors.py`."""
    found = (one for one in vars(errors).values() if inspect.isclass(one))
    kinds = {one.kind: one for one in found if issubclass(one, TrainwrightError)}
    rows = sorted(kinds.values(), key=lambda one: (one.exit_code, one.kind))
    return _CODES + "".join(f"| `{one.kind}` | {one.exit_code} | {_first(one)} |\n" for one in rows)


def _first(error: type) -> str:
    """The first paragraph of an error's docstring."""
    return cell((error.__doc__ or "").partition("\n\n")[0])


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))
