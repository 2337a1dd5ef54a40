"""The job as a flat form: one field per leaf of the job's JSON schema, named like `train.epochs`.

Sections, help, choices and limits come from `tasks.spec.job` alone. Fields are offered empty, which
means the default that their help names; only name, uri and target show those of an example. The
form has no `schedule`: it runs the job now.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.documents import parse_value, validated
from trainwright.tasks.spec.job import Job, require_metrics

_SHOWN = ("name", "data.uri", "data.target")
_LEFT_OUT = ("schedule", "pool")  # the trigger has its own parameter for the pool
_COPIED = (
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "pattern",
    "minLength",
    "minItems",
    "maxItems",
    "examples",
)


@dataclass(frozen=True)
class FormField:
    """A form field: name in the job, JSON schema (type, limits, title, section), help, default."""

    name: str
    schema: dict[str, Any]
    description: str
    default: Any
    takes_mapping: bool = False
    """whether it is a word, or a mapping as in a job file, such as `{dense: factors}`"""


@functools.cache
def job_schema() -> dict[str, Any]:
    """The job's JSON schema."""
    return Job.model_json_schema()


def fields(example: Job | None = None) -> list[FormField]:
    """The form's fields, with the example's name, uri and target if there is one."""
    document = job_schema()
    values = json.loads(example.model_dump_json()) if example is not None else {}
    return list(_walk(document, document["$defs"], "", values, optional=False))


def _walk(
    model: dict[str, Any], definitions: dict[str, Any], path: str, values: Any, optional: bool
) -> Iterator[FormField]:
    for key, given in model["properties"].items():
        name = f"{path}{key}"
        if name in _LEFT_OUT:
            continue
        spec, nullable = _without_null(given)
        inner = values.get(key) if isinstance(values, dict) else None
        if "$ref" in spec:
            below = definitions[spec["$ref"].rpartition("/")[2]]
            yield from _walk(below, definitions, f"{name}.", inner, optional or nullable)
            continue
        required = key in model.get("required", []) and not optional
        schema = _leaf(spec, not required, given.get("title", key))
        if name in _SHOWN:  # Airflow shows fields without a section first, and unfolded
            schema["title"] = _section(name)
        else:
            schema["section"] = _section(path)
        help_text, left_out = given.get("description", ""), given.get("default")
        takes_mapping = any("$ref" in one for one in spec.get("anyOf", []))
        if left_out not in (None, [], {}):
            timed = not takes_mapping and "examples" in schema and "number" not in schema["type"]
            help_text += f"; default: {_time(left_out) if timed else _plain(left_out)}"
        if takes_mapping:
            help_text += "; a word, or a mapping as in a job file, such as {dense: factors}"
        # A switch has no empty state, so it shows what holds if nobody touches it. A field of an
        # optional part stays empty: the part exists only if one of its fields is filled in.
        switch = spec.get("type") == "boolean" and not optional
        default = inner if name in _SHOWN else left_out if switch else None
        yield FormField(name, schema, help_text, default, takes_mapping)


def _without_null(spec: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """A schema without its null alternative, and whether null was allowed."""
    options = spec.get("anyOf")
    if options is None:
        return spec, False
    left = [one for one in options if one.get("type") != "null"]
    rest = {key: value for key, value in spec.items() if key != "anyOf"}
    return ({**left[0], **rest} if len(left) == 1 else {**rest, "anyOf": left}), len(left) < len(
        options
    )


def _leaf(spec: dict[str, Any], empty: bool, title: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"title": title}
    options = spec.get("anyOf", [])
    if any("$ref" in one for one in options):  # a word, or a mapping as text
        named = [word for one in options for word in one.get("enum", [])]
        schema |= {"type": ["string"], "examples": named}
    elif options:  # a number, or text such as `auto`
        words = "|".join(one["const"] for one in options if "const" in one)
        schema |= {
            "type": ["string", "number"],
            "pattern": rf"^\s*({words}|[0-9.]+([eE][-+]?[0-9]+)?)\s*$",
            "examples": [words],
        }
    else:
        schema["type"] = [spec.get("type", "string")]
        schema |= {key: spec[key] for key in _COPIED if key in spec}
        if "enum" in spec:
            schema["enum"] = [*spec["enum"], None] if empty else spec["enum"]
        if "items" in spec or "prefixItems" in spec:
            schema["items"] = {"type": spec.get("items", {"type": "number"}).get("type", "string")}
    schema["type"] = [*schema["type"], "null"] if empty else schema["type"]
    if len(schema["type"]) == 1:
        schema["type"] = schema["type"][0]
    return schema


def _section(path: str) -> str:
    words = path.rstrip(".").replace("_", " ").replace(".", ": ")
    return words[:1].upper() + words[1:] if words else "Job"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _time(default: Any) -> str:
    """A time as a person would write it, with its unit."""
    return f"{float(str(default).removesuffix('s')):g}s"


class Form:
    """A form with its defaults, and the conversion back to a job, which omits empty fields.

    A switch that nobody touched counts as empty.
    """

    def __init__(self, example: Job | None = None) -> None:
        self.fields = fields(example)

    def job(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The job of the filled-in form, as a job file's mapping. Raises BadInput with one line."""
        found: dict[str, Any] = {}
        filled = {one.name: _read(one, values.get(one.name, one.default)) for one in self.fields}
        for name, value in filled.items():
            if value is None:
                continue
            *above, last = name.split(".")
            place = found
            for key in above:
                place = place.setdefault(key, {})
            place[last] = value
        require_metrics(validated(Job, found, "form"), "form")
        return found

    def job_text(self, params: Mapping[str, Any]) -> str:
        """The chain's `job`: the path of the named job file, else the form's job as JSON.

        Raises BadInput if both are filled in.
        """
        named = params.get("job")
        if not named:
            return json.dumps(self.job(params))
        changed = [
            one.name for one in self.fields if params.get(one.name, one.default) != one.default
        ]
        if changed:
            raise BadInput(
                f"job: got {named!r} and {', '.join(changed[:5])}; "
                "pass either a job file or the form's fields"
            )
        return json.dumps(named) if isinstance(named, dict) else str(named)


def _read(one: FormField, value: Any) -> Any:
    """A field's value: None if empty; a number if the text is one and the field allows both."""
    untouched = one.default is not None and isinstance(value, bool) and value == one.default
    if value is None or untouched or (isinstance(value, str) and not value.strip()):
        return None
    kinds = one.schema["type"]
    if one.takes_mapping and isinstance(value, str):
        return parse_value(value, f"form: {one.name}")
    if isinstance(value, str) and "number" in kinds and "string" in kinds:
        return _number(value.strip())
    return value


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
