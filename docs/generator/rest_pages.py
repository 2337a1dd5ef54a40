"""The page of the REST routes, and the document in OpenAPI's format."""

from __future__ import annotations

import json
from typing import Any

from model_tables import allowed, cell

from trainwright.tasks.service.app import create_app
from trainwright.tasks.service.auth import BearerTokens
from trainwright.tasks.service.service import Service
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.job import Job

_HEAD = """# REST routes

`trainwright serve` answers on these paths, and Airflow's API server below `/trainwright`. Every
route needs a login; [the service](../how-to/service.md) says how, and which role may what. An error
is `{"error": {"kind", "message", …}}`, with the status that the route lists.
[openapi.json](openapi.json) is the whole schema, as `GET /openapi.json` answers it.
"""


def document() -> dict[str, Any]:
    """The routes in OpenAPI's format. Nothing is started."""
    app = create_app(Service(Settings({})), BearerTokens({"run": "unused"}), start=False)
    found: dict[str, Any] = app.openapi()
    return found


def rest(schema: dict[str, Any]) -> str:
    """Each route with its parameters, body, answer and errors."""
    lines = [_HEAD]
    schemas = schema["components"]["schemas"]
    for path, methods in schema["paths"].items():
        for method, one in methods.items():
            lines += [f"## {method.upper()} {path}", "", one.get("description", ""), ""]
            if parameters := one.get("parameters"):
                lines += ["| parameter | allowed | meaning |", "|---|---|---|"]
                lines += [_parameter(each) for each in parameters]
                lines.append("")
            if body := one.get("requestBody"):
                name = _reference(body["content"]["application/json"]["schema"])
                lines += [*_fields(name, schemas[name]), ""]
            lines += ["| status | meaning |", "|---|---|"]
            lines += [f"| {code} | {_answer(each)} |" for code, each in one["responses"].items()]
            lines.append("")
    return "\n".join(lines)


def openapi_text(schema: dict[str, Any]) -> str:
    """The document as a file."""
    return json.dumps(schema, indent=1) + "\n"


def _parameter(one: dict[str, Any]) -> str:
    text = one.get("description") or one["schema"].get("description") or _named(one)
    kind = allowed(one["schema"], lambda name: name)
    return f"| `{one['name']}` | {kind} | {cell(text)} |"


def _named(one: dict[str, Any]) -> str:
    """The meaning of a parameter that the path names."""
    return "in the path" if one["in"] == "path" else ""


def _fields(name: str, body: dict[str, Any]) -> list[str]:
    rows = [cell(body.get("description", "")), "", "| field of the body | allowed | meaning |"]
    rows.append("|---|---|---|")
    of_job = Job.model_fields if "objective" in body["properties"] else ()
    for key, field in body["properties"].items():
        need = " (required)" if key in body.get("required", []) else ""
        kind = allowed(field, lambda inner: f"`{inner}`")
        text = field.get("description") or ("as in [a job file](job.md)" if key in of_job else "")
        rows.append(f"| `{key}` | {kind}{need} | {cell(text)} |")
    return rows


def _answer(response: dict[str, Any]) -> str:
    content = response.get("content", {}).get("application/json", {}).get("schema", {})
    names = [_reference(one) for one in [content, *content.get("anyOf", [])] if "$ref" in one]
    text = cell(response.get("description", ""))
    return f"{text}: {' or '.join(f'`{name}`' for name in names)}" if names else text


def _reference(schema: dict[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]
