"""Parses what people write, YAML (1.2 core types, no tags or aliases) or JSON, into models.

An invalid document gives an error of one line: the file, the field, the given value, the allowed
values. Stored artefacts are read elsewhere (`tasks.runs.run`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError

from trainwright.estimator.named_file import read_named
from trainwright.estimator.near_names import meant
from trainwright.tasks.errors import BadInput

MAX_BYTES = 1_000_000
_MAX_DEPTH = 30
_MOST_DIGITS = 100
_NOT_FINITE = re.compile(r"[-+]?\.?(nan|inf)", re.IGNORECASE)
_PLAIN_NAME = re.compile(r"[a-z_]{1,30}")
"""A field's name that holds no secret, unlike a line of a list of passwords."""
_QUOTED = re.compile(r"(, but (found|got))? '[^'<]*\w[^']*'")
"""What PyYAML's messages quote of a text; names of its tokens, such as '<scalar>', are not."""


class Document(BaseModel):
    """Base of everything that people write: frozen, without unknown fields, with finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_lookalikes(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic would convert: `true` or "5" to a number, "yes" to a bool."""
        field = cls.model_fields[info.field_name or ""]
        if any(isinstance(one, BeforeValidator) for one in field.metadata):
            return value
        kinds = _kinds(field.annotation)
        if kinds == {bool} and not isinstance(value, bool):
            raise ValueError("true or false")
        if kinds & {int, float} and not kinds & {bool, str}:
            for one in value if isinstance(value, list | tuple) else [value]:
                if isinstance(one, bool) or (isinstance(one, str) and one not in kinds):
                    number = "a number" if float in kinds else "a whole number"
                    if _NOT_FINITE.fullmatch(str(one)):
                        number = "a finite number"
                    raise ValueError(number + (" or auto" if "auto" in kinds else ""))
        return value


def _kinds(annotation: Any) -> set[Any]:
    """The plain types and literals in an annotation, without None. Types parsed from text: text."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    inner = [one for one in get_args(annotation) if one is not type(None)]
    if get_origin(annotation) is Annotated:
        inner = [str] if any(isinstance(one, BeforeValidator) for one in inner) else inner[:1]
    if not inner:
        return {annotation}
    return set().union(*(_kinds(one) for one in inner))


AnyDocument = TypeVar("AnyDocument", bound=Document)
AnyModel = TypeVar("AnyModel", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """Safe YAML with the types of YAML 1.2's core schema: `no` and `18:00` are text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]  # PyYAML's parser has no types
        if isinstance(event, yaml.AliasEvent):
            raise _refused(event, "aliases (*name) are not allowed")
        if getattr(event, "tag", None):
            raise _refused(event, "tags (!name) are not allowed")
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise _refused(event, f"nested deeper than {_MAX_DEPTH} levels")
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for place, _ in node.value:
            key = self.construct_object(place, deep=True)
            if not isinstance(key, str):
                raise _refused(place, "a field's name is not text")
            if key in seen:
                raise _refused(place, "a field occurs twice")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _refused(place: Any, problem: str) -> yaml.MarkedYAMLError:
    """The error for a node or an event."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("tag:yaml.org,2002:int", r"^[-+]?[0-9]+$", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$",
        "-+.0123456789",
    ),
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
):
    _Loader.add_implicit_resolver(
        _tag, re.compile(_pattern), list(_first) + ([""] if "null" in _tag else [])
    )


def _whole(_: yaml.SafeLoader, node: Any) -> int:
    if len(node.value) > _MOST_DIGITS:
        digits = len(node.value)
        raise _refused(node, f"a number of {digits} digits; allowed: up to {_MOST_DIGITS}")
    return int(node.value)


_Loader.add_constructor("tag:yaml.org,2002:int", _whole)


def parse_text(text: str, name: str) -> dict[str, Any]:
    """The mapping in a YAML or JSON text.

    Raises BadInput, with the document's name, and line and column. It never quotes the text, which
    may be a secret that was passed by mistake.
    """
    value = parse_value(text, name)
    if value is None:
        raise BadInput(f"{name}: the file is empty; allowed: a mapping of fields")
    if not isinstance(value, dict):
        raise BadInput(f"{name}: got {kind_of(value)}; allowed: a mapping of fields")
    return value


def parse_value(text: str, name: str) -> Any:
    """The value in a YAML or JSON text. Raises BadInput as `parse_text` does."""
    if len(text.encode(errors="replace")) > MAX_BYTES:
        raise BadInput(f"{name}: larger than {MAX_BYTES} bytes")
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadInput(f"{name}: not valid YAML or JSON{_why(error, text)}") from None


def _why(error: Exception, text: str) -> str:
    """Where a text is not YAML, and why, without what it contains."""
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return f" (line {line}, column {column}): a character that is not allowed"
    if not isinstance(error, yaml.MarkedYAMLError):  # a number that Python can't convert
        return ": a value can't be read"
    mark = error.problem_mark or error.context_mark
    where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
    return f"{where}: {_QUOTED.sub('', error.problem or 'not understood')}"


def kind_of(value: object) -> str:
    """The kind of a value, in words, for errors about values that should be mappings."""
    return {list: "a list", str: "text", bool: str(value).lower(), type(None): "null"}.get(
        type(value), "a number"
    )


def read_mapping(path: Path, field: str = "") -> dict[str, Any]:
    """The mapping in a YAML or JSON file. `field` is the field or option that names the file.

    Raises BadInput if the file does not hold a mapping.
    """
    try:
        text = read_named(path, field, MAX_BYTES).decode()
    except UnicodeDecodeError:
        raise BadInput(f"{path}: can't be read as text (not UTF-8)") from None
    return parse_text(text, str(path))


def validated(model: type[AnyDocument], values: dict[str, Any], name: str) -> AnyDocument:
    """The model with these values. Raises BadInput: document, field, given, allowed in one line."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        absent = [one for one in problems if one["type"] == "missing" and len(one["loc"]) == 1]
        unknown = [
            one for one in problems if one["type"] == "extra_forbidden" and len(one["loc"]) == 1
        ]
        # Another kind of document: do not print its content; it may hold secrets.
        if absent and unknown:
            first = str(unknown[0]["loc"][0])
            such = f", such as {first}" if _PLAIN_NAME.fullmatch(first) else ""
            count = f"{len(unknown)} unknown field{'s' if len(unknown) > 1 else ''}{such}"
            raise BadInput(f"{name}: {problems_line(absent)}; {count}") from None
        if problems[0]["type"] == "extra_forbidden":
            problems[0]["ctx"] = {"fields": ", ".join(_fields(model, problems[0]["loc"]))}
        raise BadInput(f"{name}: {problems_line(problems)}") from None


def parsed(model: type[AnyModel], content: bytes, name: str) -> AnyModel:
    """The artefact in a JSON file; fields of later versions are ignored. Raises BadInput."""
    try:
        return model.model_validate_json(content, extra="ignore")
    except ValidationError as error:
        file = getattr(model, "FILE", model.__name__)
        raise BadInput(f"{name}: is not a {file}: {one_line(error)}") from None


def matching(pattern: str, words: str, make: Callable[..., Any] = Field, **more: Any) -> Any:
    """A text field that must match a pattern; `words` say what is allowed in the error.

    `make` is FastAPI's Path or Query for a parameter of a route.
    """
    assert _WORDS.setdefault(pattern, words) == words, f"{pattern} has other words elsewhere"
    return make(pattern=pattern, **more)


_WORDS: dict[str, str] = {}
_ALLOWED = {
    "string_type": "text",
    "string_sub_type": "text",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number with fewer digits",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping of fields",
    "model_type": "a mapping of fields",
    "model_attributes_type": "a mapping of fields",
    "finite_number": "a finite number",
    "string_unicode": "Unicode text",
    "json_invalid": "JSON",
    "json_type": "JSON",
    "literal_error": "{expected}",
    "too_short": "a list of at least {min_length} item(s)",
    "too_long": "at most {max_length} item(s)",
    "string_too_short": "at least {min_length} character(s)",
    "string_too_long": "at most {max_length} character(s)",
}
_GIVEN = 80


def one_line(error: ValidationError) -> str:
    """A ValidationError in one line: its first problem, and the names of other wrong fields."""
    return problems_line(error.errors(include_url=False))


def problems_line(problems: Sequence[Any]) -> str:
    """Pydantic's list of problems in one line: field, given (cut to 80 characters), allowed."""
    first = problems[0]
    field = _field(first)
    if first["type"] == "extra_forbidden":
        allowed = first.get("ctx", {}).get("fields")
        near = meant(first["loc"][-1], (allowed or "").split(", "))
        line = f"{field}: unknown field{f'; allowed: {allowed}{near}' if allowed else ''}"
    elif first["type"] == "missing":
        line = f"{field}: required field is missing"
    elif first["type"] == "contradiction":
        line = f"{field}.{first['msg']}"
    else:
        given = _given(first)
        # A union reports one problem for each of its kinds.
        kinds = list(dict.fromkeys(_allowed(one) for one in problems if _field(one) == field))
        allowed = " or ".join([", ".join(kinds[:-1]), kinds[-1]] if len(kinds) > 1 else kinds)
        words = [
            word
            for one in problems
            if _field(one) == field and one["type"] == "literal_error"
            for word in re.findall(r"'([^']+)'", one["ctx"]["expected"])
        ]
        near = meant(first.get("input"), words)
        line = f"{field}: {f'got {given}; ' if given else ''}allowed: {allowed}{near}"
    # A mapping that is wrong within is also none of the other kinds of its union.
    others = list(
        dict.fromkeys(
            name
            for one in problems[1:]
            if (name := _field(one)) != field and not field.startswith(f"{name}.")
        )
    )
    more = (
        f" (also wrong: {', '.join(others[:5])}{' …' if len(others) > 5 else ''})" if others else ""
    )
    return line.removeprefix(": ") + more


def _given(problem: Any) -> str:
    """The given value; empty for fields that contradict each other (the message names them)."""
    value = problem.get("input")
    if problem["type"] == "json_invalid":
        return f"other text ({problem['ctx']['error']})"
    if isinstance(value, dict | BaseModel):
        return "" if problem["type"] == "value_error" else "a mapping of fields"
    if value is None or isinstance(value, bool):
        return kind_of(value)
    # Cut before repr: the value may be very long.
    text = repr(value[:_GIVEN] if isinstance(value, str | bytes | list | tuple) else value)
    return text if len(text) <= _GIVEN else text[: _GIVEN - 3] + "..."


def _fields(model: type[BaseModel], loc: Sequence[str | int]) -> list[str]:
    """The allowed fields at this place of a document."""
    here = [model]
    for part in loc[:-1]:
        fields = [
            one.model_fields[part]
            for one in here
            if isinstance(part, str) and part in one.model_fields
        ]
        if fields:  # otherwise an item of a list, or a member of a union
            here = [found for one in fields for found in _models(one.annotation)]
    return [name for one in here for name in one.model_fields]


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models in a field's annotation, also within lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for one in get_args(annotation) for found in _models(one)]


def _allowed(problem: Any) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "string_pattern_mismatch":
        return _WORDS.get(context["pattern"], f"text that matches {context['pattern']}")
    if kind in _ALLOWED:
        return _ALLOWED[kind].format(**context)
    return str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")


def _field(problem: Any) -> str:
    parts = [str(part) for part in problem["loc"] if str(part) not in _KINDS_OF_UNIONS]
    named = (
        one for one in parts if not one.startswith(("function-", "tagged-", "literal[", "list["))
    )
    return ".".join((one if one.isprintable() else repr(one))[:_GIVEN] for one in named)


_KINDS_OF_UNIONS = {
    "int",
    "float",
    "str",
    "bool",
    "constrained-int",
    "constrained-float",
    "constrained-str",
    "LayoutSpec",
}


_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST_S = 3650 * _TIMES["d"]
_SIZES = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_RATES = {"kbit": 125.0, "Mbit": 125e3, "Gbit": 125e6, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def _measure(value: Any, units: dict[str, float], example: str) -> float:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?)\s*([A-Za-z]+)\s*", value)
        if match and match.group(2) in units:
            # Exactly rounded, so that 50us is 5e-05 and not a bit less.
            return float(Decimal(match.group(1)) * Decimal(repr(units[match.group(2)])))
    raise PydanticCustomError(
        "no_unit",
        "a number with its unit, one of {units}, such as {example}",
        {"units": ", ".join(units), "example": example},
    )


def _wait(value: Any) -> float:
    seconds = _measure(value, _TIMES, "30m")
    if seconds > _LONGEST_S:
        raise ValueError("up to 3650d, such as 30m")
    return seconds


def _duration(value: Any) -> float:
    seconds = _measure(value, _TIMES, "30m")
    if not 0 < seconds <= _LONGEST_S:
        raise ValueError("more than zero, up to 3650d, such as 30m")
    return seconds


def _bandwidth(value: Any) -> float:
    rate = _measure(value, _RATES, "10Gbit")
    if not 125.0 * (1 - 1e-9) <= rate <= 125e12:  # a written value may be rounded
        raise ValueError("1kbit to 1000000Gbit, such as 10Gbit")
    return rate


def _memory(value: Any) -> float:
    size = _measure(value, _SIZES, "64GiB")
    if not 1e6 <= size <= 1e15:
        raise ValueError("1MB to 1000TB, such as 64GiB")
    return size


def _latency(value: Any) -> float:
    seconds = _measure(value, _TIMES, "50us")
    if not 0 < seconds <= 10:
        raise ValueError("more than zero, up to 10s, such as 50us")
    return seconds


def _time_text(seconds: float) -> str:
    """A time in its largest unit below it that reads back as the same number: 5e-05 -> 50us."""
    for unit in ("s", "ms", "us"):
        text = f"{seconds / _TIMES[unit]:.12g}{unit}"
        if (seconds >= _TIMES[unit] or unit == "us") and _measure(text, _TIMES, text) == seconds:
            return text
    return f"{seconds!r}s"


def _text_schema(example: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "examples": [example]})


Duration = Annotated[
    float,
    BeforeValidator(_duration),
    PlainSerializer(lambda seconds: f"{seconds!r}s", return_type=str),
    _text_schema("30m"),
]
"""Seconds, written with a unit: 90s, 30m, 8h, 50us; up to 3650d."""

Wait = Annotated[
    float,
    BeforeValidator(_wait),
    PlainSerializer(lambda seconds: f"{seconds!r}s", return_type=str),
    _text_schema("30m"),
]
"""Seconds, as Duration, but may be zero: 0s."""

Bandwidth = Annotated[
    float,
    BeforeValidator(_bandwidth),
    PlainSerializer(lambda rate: f"{rate / 125e6!r}Gbit", return_type=str),
    _text_schema("10Gbit"),
]
"""Bytes per second, written with a unit: 200Mbit, 10Gbit, 1GB."""

MemorySize = Annotated[
    float,
    BeforeValidator(_memory),
    PlainSerializer(lambda size: f"{size / 2**30!r}GiB", return_type=str),
    _text_schema("64GiB"),
]
"""Bytes, written with a unit: 500MB, 64GiB."""

Latency = Annotated[
    float,
    BeforeValidator(_latency),
    PlainSerializer(_time_text, return_type=str),
    _text_schema("50us"),
]
"""Seconds, as Duration, up to 10s."""


def number(name: str, value: object) -> float:
    """A number, given as a number or as text (from a template). Raises BadInput."""
    try:
        return float(str(value))
    except ValueError:
        raise BadInput(f"{name}: got {value!r}; allowed: a number") from None


def whole_number(name: str, value: object) -> int:
    """A whole number, given as a number or as text (from a template). Raises BadInput."""
    found = number(name, value)
    if not found.is_integer():
        raise BadInput(f"{name}: got {value!r}; allowed: a whole number")
    return int(found)


def texts(name: str, value: object) -> list[str]:
    """A list of texts, or one text. Raises BadInput."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(one, str) for one in listed):
        raise BadInput(f"{name}: got {value!r:.80}; allowed: a list of texts")
    return list(listed)
