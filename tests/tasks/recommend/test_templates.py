"""Every template's source: clean, deterministic, runs alone, and predicts from raw rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from source_checks import require_clean
from table_case import HEADER, KINDS, batch, generated, rows, schema, vocabularies

from trainwright.tasks.errors import BadInput
from trainwright.tasks.recommend.source_code import MOST_LINES
from trainwright.tasks.recommend.templates import templates
from trainwright.tasks.recommend.templates.template import Template
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.spec.job import Job

HOSTILE = [
    "大" * 50,
    "a\nb'''\"\"\"",
    "{x} ${y} %s $numbers",
    "größe 大小 \u202e\u0000",
    "x" * 5_000 + " words" * 1_000,
    "'); import os; os.abort() #",
    "\\",
    '"',
]
TABLES = [one for one in templates().values() if "tabular-regression" in one.tasks]
tables = pytest.mark.parametrize("template", TABLES, ids=lambda one: one.name)
kinds = pytest.mark.parametrize("kind", KINDS, ids=str)


def sources(folder: Path) -> list[Path]:
    """Files of all templates for tables: every kind, every size, hostile names, 300 columns."""
    hostile = schema(4, 3, True, 2, HOSTILE)
    wide = hostile.model_copy(
        update={
            "columns": [
                one.model_copy(update={"name": f"{one.kind} {place}", "missing": 1})
                for one in (hostile.columns[0], hostile.columns[-1])
                for place in range(300)
            ]
        }
    )
    cases: list[tuple[str, Template, DataSchema, str]] = []
    for template in TABLES:
        cases += [
            (f"{number}", template, schema(*kind), "medium") for number, kind in enumerate(KINDS)
        ]
        cases += [(size, template, schema(4, 3, True, 3), size) for size in template.sizes]
        cases += [("hostile", template, hostile, "small"), ("wide", template, wide, "small")]
        cases += [
            (f"hostile_{length}_{space}", template, schema(1, 1, False, 0, [name] * 3), "small")
            for length in (76, 88, 90, 92, 120)
            for space in (0, 1)
            for name in ["x" * length + " y" * space]
        ]
    written = []
    for case, template, data, size in cases:
        text = template.source(data, template.sizes[size], HEADER)
        assert text == template.source(data, template.sizes[size], HEADER)
        assert text.count("\n") <= MOST_LINES, (template.name, case)
        path = folder / f"{template.name.replace(' ', '_').replace('-', '_')}_{case}.py"
        path.write_text(text)
        written.append(path)
    return written


def test_sources_pass_ruff_and_mypy_strict(tmp_path: Path) -> None:
    require_clean(tmp_path, sources(tmp_path))


@tables
@pytest.mark.parametrize("names", [None, HOSTILE], ids=["plain names", "hostile names"])
def test_a_source_runs_alone(tmp_path: Path, template: Template, names: list[str] | None) -> None:
    path = tmp_path / "model.py"
    path.write_text(template.source(schema(4, 3, True, 2, names), template.sizes["small"], HEADER))
    done = subprocess.run(
        [sys.executable, "-I", str(path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "parameters" in done.stdout
    assert "'prediction': [" in done.stdout


@tables
@kinds
def test_adapted_models_predict_from_raw_rows_what_they_predict_from_arrays(
    tmp_path: Path, template: Template, kind: tuple[int, int, bool, int]
) -> None:
    data = schema(*kind)
    made = generated(template, data, tmp_path)
    raw = rows(data)
    inputs, targets = batch(data, raw)
    torch.manual_seed(0)
    model = made.build_model()
    with torch.no_grad():
        made.adapt(model, inputs, targets, vocabularies(data))
        model.eval()
        outputs = model(inputs)
    found = made.predict(model, {column.name: raw[column.name] for column in data.columns})
    if data.classes:
        probability, best = outputs.softmax(1).max(1)
        assert found["prediction"] == [data.classes[one] for one in best.tolist()]
        assert found["probability"] == pytest.approx(probability.tolist(), abs=1e-6)
    else:
        assert found["prediction"] == pytest.approx(outputs.tolist())


@tables
@pytest.mark.parametrize("kind", [(4, 3, True, 2), (4, 3, True, 0)], ids=str)
def test_a_stored_model_needs_only_its_source_and_tensors_to_predict(
    tmp_path: Path, template: Template, kind: tuple[int, int, bool, int]
) -> None:
    data = schema(*kind)
    made = generated(template, data, tmp_path)
    raw = rows(data)
    first, second = made.build_model(), made.build_model()
    with torch.no_grad():
        made.adapt(first, *batch(data, raw), vocabularies(data))
    second.load_state_dict(first.state_dict())
    strange: dict[str, list[Any]] = {
        column.name: [1e30, None, -1e30]
        if column.kind == "number"
        else ["never seen", None, "\ud800"]
        for column in data.columns
    }
    found = made.predict(second, strange)
    assert found == made.predict(first, strange)
    allowed = data.classes or [pytest.approx(one, abs=3500) for one in [103_000]]
    assert all(one in allowed for one in found["prediction"])


@tables
def test_adapt_is_deterministic(tmp_path: Path, template: Template) -> None:
    data = schema(4, 3, True, 3)
    made = generated(template, data, tmp_path)
    states = []
    for seed in (1, 1):
        torch.manual_seed(seed)
        model = made.build_model()
        torch.manual_seed(len(states))
        with torch.no_grad():
            made.adapt(model, *batch(data, rows(data)), vocabularies(data))
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@tables
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"category 1": [str(place) for place in range(9)]}, "'category 1' has 9 values"),
        ({"label": ["a class with a name that is longer than it was"] * 2}, "'label' has other"),
    ],
    ids=["values", "classes"],
)
def test_adapt_refuses_other_data_than_it_was_made_for(
    tmp_path: Path, template: Template, change: dict[str, list[str]], message: str
) -> None:
    data = schema(4, 3, True, 2)
    made = generated(template, data, tmp_path)
    with pytest.raises(ValueError, match=message):
        made.adapt(made.build_model(), *batch(data, rows(data)), vocabularies(data) | change)


@tables
def test_a_template_for_tables_refuses_other_data(template: Template) -> None:
    data = schema(4, 0, False, 2).model_copy(update={"columns": []})
    with pytest.raises(BadInput, match="data: got tabular-classification with no columns"):
        template.source(data, template.sizes["small"], HEADER)


@tables
def test_recipes_are_fields_of_the_job(template: Template) -> None:
    assert set(template.sizes) == {"small", "medium", "large"}
    for size, config in template.sizes.items():
        job = {"name": size, "data": {"uri": "table.csv"}, "train": {}}
        for field, value in template.recipe(schema(4, 3, True, 3), config).items():
            assert field.startswith("train.")
            job["train"][field.removeprefix("train.")] = value  # type: ignore[index]
        Job.model_validate(job)
