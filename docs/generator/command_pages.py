"""The page of the commands, from typer's own description of them."""

from __future__ import annotations

import inspect
from typing import Any

from model_tables import cell
from typer.main import get_command

from trainwright.tasks.cli.main import app

_HEAD = """# Commands

[The command line](../how-to/commands.md) says what they have in common: continued runs, `--set`,
`--json`. [Exit codes](exit-codes.md) are the same for all. `trainwright COMMAND --help` prints what
is on this page.
"""


def commands() -> str:
    """Each command with its arguments and options."""
    found: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]  # a group
    lines = [_HEAD, "| command | does |", "|---|---|"]
    for name, one in found.items():
        first = inspect.cleandoc(one.help or "").partition("\n\n")[0]
        lines.append(f"| [`{name}`](#{name.replace(' ', '-')}) | {cell(first)} |")
    for name, one in found.items():
        lines += ["", f"## {name}", "", f"`trainwright {' '.join([name, *_usage(one)])}`", ""]
        lines += [
            inspect.cleandoc(one.help or ""),
            "",
            "| argument or option | default | meaning |",
        ]
        lines += ["|---|---|---|", *(_row(parameter) for parameter in one.params)]
    return "\n".join(lines) + "\n"


def _usage(command: Any) -> list[str]:
    """The command's arguments, and that it has options."""
    words = []
    for one in command.params:
        if one.param_type_name == "argument":
            words.append(_name(one) if one.required else f"[{_name(one)}]")
    return [*words, "[OPTIONS]"]


def _row(one: Any) -> str:
    given = one.default if type(one.default) in (str, int, float) else None
    default = "" if given is None else f"`{given}`"
    said = getattr(one, "show_default", None)  # a text: the default in words
    shown = "*required*" if one.required else f"`{said}`" if isinstance(said, str) else default
    return f"| `{_name(one)}` | {shown} | {cell(one.help or '')} |"


def _name(one: Any) -> str:
    if one.param_type_name == "argument":
        return str(one.metavar or one.name).strip("[]")
    value = "" if one.is_flag else f" {one.metavar or 'VALUE'}"
    names = [*one.opts, *one.secondary_opts]
    return ", ".join(names) + value
