"""Tables of a pydantic model's fields: name, allowed values, default, meaning.

All of it comes from the model's JSON schema, so from the classes in `tasks/spec/`,
`tasks/runs/artefacts/` and `tasks/service/`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]
Link = Callable[[str], str]
_WORDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true, false",
    "null": "null",
    "object": "mapping",
    "array": "list",
}
_MOST_DEFAULT = 60
"""Characters of a default that a cell shows."""


def table(name: str, model: Schema, definitions: dict[str, Schema], link: Link, path: str) -> str:
    """The fields of the class `name`, one a row. `path` stands before each field's name."""
    required = model.get("required", [])
    defaults = _defaults(name)
    rows = ["| field | allowed | default | meaning |", "|---|---|---|---|"]
    for key, field in model.get("properties", {}).items():
        default = "*required*" if key in required else _default(defaults.get(key))
        cells = f"`{path}{key}`", allowed(field, link), default, meaning(field, definitions)
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def meaning(field: Schema, definitions: dict[str, Schema]) -> str:
    """A field's description, or the first sentence of that of the object that it holds."""
    if text := field.get("description"):
        return cell(str(text))
    held = [str(definitions[one].get("description", "")) for one in _references(field)]
    return cell(held[0].partition("\n\n")[0].rstrip(".")) if held else ""


def _defaults(name: str) -> Schema:
    """The defaults of a class, as they stand in a file."""
    made = _classes()[name].model_construct()
    values: Schema = made.model_dump(mode="json", warnings=False)
    return values


@cache
def _classes() -> dict[str, type[BaseModel]]:
    """All models that are loaded, by name. A test holds that names are unique."""
    found: dict[str, type[BaseModel]] = {}
    below = [BaseModel]
    while below:
        for one in below.pop().__subclasses__():
            if one.__module__.startswith("trainwright."):
                found[one.__name__] = one
            below.append(one)
    return found


def allowed(field: Schema, link: Link) -> str:
    """What a field takes, in words; `link` makes the reference to another object."""
    if "$ref" in field:
        return link(field["$ref"].rpartition("/")[2])
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{one}`" for one in field["enum"])
    if "anyOf" in field:
        kinds = (allowed(one, link) for one in field["anyOf"])
        return " or ".join(dict.fromkeys(one for one in kinds if one != "null"))
    if "allOf" in field:
        return ", ".join(allowed(one, link) for one in field["allOf"])
    kind = field.get("type", "")
    if kind == "array":
        return _list(field, link)
    if kind == "object":
        inner = field.get("additionalProperties")
        return (
            f"mapping to {allowed(inner, link)}" if isinstance(inner, dict) and inner else "mapping"
        )
    word = _WORDS.get(kind, "any value")
    return word + _bounds(field)


def _list(field: Schema, link: Link) -> str:
    if "prefixItems" in field:
        return "[" + ", ".join(allowed(one, link) for one in field["prefixItems"]) + "]"
    inner = field.get("items")
    return f"list of {allowed(inner, link)}" if isinstance(inner, dict) and inner else "list"


def _bounds(field: Schema) -> str:
    """Limits of a number: `0 to 1`, `above 0`, `up to 5`."""
    least, above = field.get("minimum"), field.get("exclusiveMinimum")
    most, below = field.get("maximum"), field.get("exclusiveMaximum")
    low = "" if least is None else _number(least)
    low = low if above is None else f"above {_number(above)}"
    high = "" if most is None else _number(most)
    high = high if below is None else f"below {_number(below)}"
    if low and high:
        return f", {low} to {high}"
    if least is not None:
        return f", {low} or more"
    return f", {low}" if low else f", up to {high}" if high else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:g}"


def _default(value: Any) -> str:
    if value is None or isinstance(value, dict):
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = re.sub(r"\.0(?=[A-Za-z]|$)", "", text)  # 3600.0s is 3600s
    return f"`{cell(text)}`" if len(text) <= _MOST_DEFAULT and value != [] else ""


def cell(text: str) -> str:
    """A text as a table's cell."""
    return " ".join(text.split()).replace("|", "\\|")


def parts(model: type[BaseModel], mode: Any = "validation") -> tuple[Schema, dict[str, Schema]]:
    """A model's schema, and those of the objects in it, by class."""
    document = model.model_json_schema(mode=mode)
    return document, document.pop("$defs", {})


def tree(model: type[BaseModel], heading: int = 2) -> str:
    """A model that people write, as sections: first its own fields, then those of each part."""
    document, definitions = parts(model)
    lines: list[str] = []
    for path, name, part in _walk(model.__name__, document, definitions, ""):
        lines += [f"{'#' * (heading + min(path.count('.'), 1))} {path or 'The file'}", ""]
        if description := part.get("description"):
            lines += [description.strip(), ""]
        prefix = f"{path}." if path else ""
        lines += [table(name, part, definitions, partial(_below, definitions), prefix), ""]
    return "\n".join(lines)


def _walk(
    name: str, part: Schema, definitions: dict[str, Schema], path: str
) -> Iterator[tuple[str, str, Schema]]:
    yield path, name, part
    for key, field in part.get("properties", {}).items():
        for reference in _references(field):
            if "properties" in (inner := definitions[reference]):
                listed = "[]" if _is_list(field) else ""
                below = f"{path}.{key}{listed}".lstrip(".")
                yield from _walk(reference, inner, definitions, below)


def _references(field: Schema) -> Iterator[str]:
    if "$ref" in field:
        yield field["$ref"].rpartition("/")[2]
    for one in [*field.get("anyOf", []), *field.get("allOf", [])]:
        yield from _references(one)
    for key in ("items", "additionalProperties"):
        if isinstance(field.get(key), dict):
            yield from _references(field[key])


def _is_list(field: Schema) -> bool:
    return field.get("type") == "array" or any(map(_is_list, field.get("anyOf", [])))


def _below(definitions: dict[str, Schema], name: str) -> str:
    part = definitions[name]
    return "mapping, below" if "properties" in part else allowed(part, lambda _: "mapping")
