"""The page of what Airflow shows of trainwright: DAGs, connections, configuration."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from model_tables import cell

from trainwright import dags
from trainwright.operators.provider import get_provider_info

_HEAD = """# Connections and DAGs

What the provider adds to Airflow. [An Airflow of your own](../how-to/own-airflow.md) says how to
set it up.

## DAGs

| module in `dags/` | what it does |
|---|---|
"""
_WHOLE = {"host": "Host", "port": "Port", "schema": "Schema", "login": "Login"}
_WHOLE |= {"password": "Password"}
"""Fields that every connection of Airflow has."""


def airflow_page() -> str:
    """The DAGs, then each type of connection with its fields, then the section of airflow.cfg."""
    info = get_provider_info()
    lines = [_HEAD + "\n".join(_dag_rows())]
    for one in info["connection-types"]:
        lines += ["", f"## {one['connection-type']}", "", f"A connection *{one['hook-name']}*.", ""]
        lines += ["| field | default | meaning |", "|---|---|---|", *_fields(one)]
    for name, section in info["config"].items():
        lines += ["", f"## Section [{name}] of airflow.cfg", "", section["description"], ""]
        lines += ["| option | example | meaning |", "|---|---|---|"]
        for key, option in section["options"].items():
            example = f"`{option['example']}`" if option["example"] else ""
            lines.append(f"| `{key}` | {example} | {cell(option['description'])} |")
    return "\n".join(lines) + "\n"


def _dag_rows() -> list[str]:
    (folder,) = dags.__path__
    rows = []
    for file in sorted(Path(folder).glob("*.py")):
        tree = ast.parse(file.read_text())
        if any(isinstance(one, ast.Call) and _name(one) == "DAG" for one in ast.walk(tree)):
            first = (ast.get_docstring(tree) or "").partition("\n\n")[0]
            rows.append(f"| `{file.stem}` | {cell(first)} |")
    return rows


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _fields(connection: dict[str, Any]) -> list[str]:
    """The fields that the form shows: Airflow's own, under the names it gives them, and ours."""
    form = connection["ui-field-behaviour"]
    hidden, names = form.get("hidden-fields", []), form.get("relabeling", {})
    rows = []
    for key, label in _WHOLE.items():
        if key not in hidden:
            example = form.get("placeholders", {}).get(key)
            text = f"Airflow's field `{key}`" + (f", such as `{example}`" if example else "")
            rows.append(f"| {names.get(key, label)} | | {text} |")
    for key, field in connection["conn-fields"].items():
        default = field["schema"].get("default")
        shown = f"`{default}`" if default else ""
        rows.append(f"| {field['label']} (`{key}`) | {shown} | {cell(field['description'])} |")
    return rows
