"""Pages of what people write (job, pool) and of the files of a run's folder."""

from __future__ import annotations

import model_tables
from pydantic import BaseModel

from trainwright.estimator.devices import DEVICE_TYPES
from trainwright.estimator.structure import Structure
from trainwright.tasks import chain
from trainwright.tasks.runs.artefacts.artefact import Artefact
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Pool

_ARTEFACTS = """# Files of a run

Each step adds one JSON file to the run's folder. Its class is frozen, quantities have their unit in
their name, and every file has a `schema_version`. Unknown fields are ignored, so a version reads
the files of the version before and after it. The same classes are what `--json` prints and what the
REST service answers.
"""


def job() -> str:
    """The page of the job file."""
    return (
        "# The job file\n\nYAML or JSON. [How to write one](../how-to/job-file.md) has a complete "
        "example. `--set FIELD=VALUE` changes any field of this page; a field inside of another is "
        "dotted, as it is here and in error messages. A time is one number with one unit, such as "
        "`90s` or `1.5h`.\n\n" + model_tables.tree(Job)
    )


def pool() -> str:
    """The page of the pool file."""
    return (
        "# The pool file\n\nYAML or JSON. [How to write one](../how-to/devices-and-hosts.md) has "
        "examples. `[]` stands for each entry of a list.\n\n"
        + model_tables.tree(Pool)
        + _device_types()
    )


def _device_types() -> str:
    """The device types whose datasheet is known."""
    rows = [
        "## Device types",
        "",
        "| type | memory, GiB | idle, W | load, W |",
        "|---|---|---|---|",
    ]
    for name, one in sorted(DEVICE_TYPES.items()):
        memory = f"{one.memory_bytes / 2**30:.0f}" if one.memory_bytes else "the host's"
        rows.append(f"| `{name}` | {memory} | {one.idle_w:g} | {one.load_w:g} |")
    return "\n".join(rows) + "\n"


def artefacts() -> str:
    """The page of the files in a run's folder, each with the parts that no file before it has."""
    lines, shown = [_ARTEFACTS], set[str]()
    for file, model in sorted(_files().items(), key=lambda one: _place(one[0])):
        document, definitions = model_tables.parts(model, mode="serialization")
        listed = [(model.__name__, document), *definitions.items()]
        for name, part in listed:
            if name in shown or "properties" not in part:
                continue
            shown.add(name)
            lines += [f"## {file}" if part is document else f"### {name}", ""]
            if description := part.get("description"):
                lines += [description.strip(), ""]
            link = _link(definitions)
            lines += [model_tables.table(name, part, definitions, link, ""), ""]
    return "\n".join(lines)


def _link(definitions: dict[str, model_tables.Schema]) -> model_tables.Link:
    def link(name: str) -> str:
        part = definitions[name]
        if "properties" in part:
            return f"[{name}](#{name.lower()})"
        return model_tables.allowed(part, link)

    return link


def _files() -> dict[str, type[BaseModel]]:
    """The class of each file; artefacts without a `FILE` are stored elsewhere."""
    found: dict[str, type[BaseModel]] = {
        one.FILE: one for one in Artefact.__subclasses__() if one.FILE
    }
    return {**found, Structure.FILE: Structure}


def _place(file: str) -> int:
    """Files in the order of the steps; job and status, which have no step, first."""
    names = [getattr(step.artefact, "FILE", "") for step in chain.steps()]
    return names.index(file) if file in names else -1
