"""Sources of models for texts, images and series: clean, alone, and predicting from raw rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import network_case as case
import numpy as np
import pytest
import torch
from network_case import CLASSES, HISTORY, HORIZON, NAMES, Series
from PIL import Image
from precision_case import losses
from source_checks import require_clean

from trainwright.estimator.trace import source
from trainwright.estimator.trace.batch_loss import loss_function
from trainwright.estimator.trace.source import ModelDefinition
from trainwright.tasks.data.modalities.images import ImageShape, decoded
from trainwright.tasks.data.modalities.tokens import Tokenizer, padded
from trainwright.tasks.errors import BadInput
from trainwright.tasks.recommend.source_code import MOST_LINES, Header, write_source
from trainwright.tasks.recommend.templates import templates
from trainwright.tasks.recommend.templates.template import Template
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.spec.job import Job

HEADER = Header(
    data="17,520 rows, 4 columns, sha256 0a1b2c3d4e5f " + "and words about the data " * 9,
    why="Of all models, this one is " + "the simplest and the fastest and " * 7 + "the best.",
    command="trainwright recommend job.yaml " + "--set data.uri=somewhere " * 8,
)
HOSTILE = [
    'label"\'\'\'"""\n\\',
    "{x} ${y} %s $known",
    "größe 大小 \u202e\u0000",
    "'); import os; os.abort() #",
    "\\",
]
LONG = [f"{number} {text * 1000}" for number, text in enumerate(("words", "大, ", "it's "))] * 2
SERIES = [Series(), Series(named=True), Series(known=2), Series(known=2, named=True)]
PLAIN = {
    "text-classification": [case.texts()],
    "image-classification": [case.images(), case.images((3, 32, 20)), case.images((3, 1, 5))],
    "forecasting": [one.schema() for one in SERIES],
}
HOSTILES = {
    "text-classification": case.texts(names=HOSTILE[:2]),
    "image-classification": case.images(names=HOSTILE[:2]),
    "forecasting": Series(known=2, named=True).schema(HOSTILE),
}
OF_LONG_NAMES = {
    "text-classification": case.texts(names=LONG[:2]),
    "image-classification": case.images(names=LONG[:2]),
    "forecasting": Series(known=2, named=True).schema(LONG[:5]),
}
TEMPLATES = [one for one in templates().values() if one.tasks[0] in PLAIN]


def _of(*tasks: str) -> Any:
    chosen = [one for one in TEMPLATES if one.tasks[0] in tasks]
    return pytest.mark.parametrize("template", chosen, ids=lambda one: one.name)


every = _of(*PLAIN)
forecasters = _of("forecasting")
text_models = _of("text-classification")
image_models = _of("image-classification")
series = pytest.mark.parametrize("rows", SERIES, ids=str)


def _generated(
    template: Template, data: DataSchema, folder: Path, size: str = "small"
) -> ModelDefinition:
    text = template.source(data, template.sizes[size], HEADER)
    return source.load(folder, write_source(folder, text).name)


def _rows(data: DataSchema) -> tuple[Any, torch.Tensor]:
    """Inputs and targets as a rank has them."""
    torch.manual_seed(0)
    if data.task == "forecasting":
        known = sum(column.kind == "number" for column in data.columns)
        return Series(known, "series" in data.inputs).windows()
    targets, shape = torch.arange(64) % len(CLASSES), data.inputs["inputs"]
    if data.task == "text-classification":
        return torch.randint(2**20, (64, *shape)) * (torch.arange(shape[0]) < 6), targets
    return torch.rand(64, *shape), targets


def _learn_the_calendar(model: Any) -> None:
    """Give random effects to the covariates of a model for series, which has none at first."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.effects.parameters():
            parameter.normal_()


def _names(data: DataSchema) -> dict[str, list[str]]:
    named = {column.name: NAMES for column in data.columns if column.kind == "series"}
    return named | ({data.target: data.classes} if data.classes else {})


def _adapted(made: ModelDefinition, data: DataSchema, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = made.build_model()
    assert made.adapt is not None
    with torch.no_grad():
        made.adapt(model, *_rows(data), _names(data))
    return model


def _predict(made: ModelDefinition, model: Any, rows: dict[str, list[Any]]) -> Any:
    assert made.predict is not None
    return made.predict(model, rows)


def test_sources_pass_ruff_and_mypy_strict(tmp_path: Path) -> None:
    for template in TEMPLATES:
        task = template.tasks[0]
        for number, data in enumerate([*PLAIN[task], HOSTILES[task], OF_LONG_NAMES[task]]):
            for size, config in template.sizes.items():
                text = template.source(data, config, HEADER)
                assert text == template.source(data, config, HEADER)
                assert text.count("\n") <= MOST_LINES, (template.name, number, size)
                name = f"{template.name.replace('-', '_')}_{number}_{size}.py"
                (tmp_path / name).write_text(text)
    require_clean(tmp_path, [one.name for one in tmp_path.glob("*.py") if "_medium" in one.name])


@every
def test_a_source_runs_alone(tmp_path: Path, template: Template) -> None:
    path = tmp_path / "model.py"
    config = list(template.sizes.values())[-1]
    path.write_text(template.source(HOSTILES[template.tasks[0]], config, HEADER))
    done = subprocess.run(
        [sys.executable, "-I", str(path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "parameters" in done.stdout
    assert "'prediction': [" in done.stdout


@every
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16", "amp"])
def test_a_model_learns_in_every_precision(
    tmp_path: Path, template: Template, precision: str
) -> None:
    data = PLAIN[template.tasks[0]][-1]
    made = _generated(template, data, tmp_path)
    found = losses(
        made, _adapted(made, data), data.task, _rows(data), precision, steps=30, rate=0.01
    )
    assert sum(found[-5:]) < 0.97 * sum(found[:5])


@every
def test_a_stored_model_needs_only_its_source_and_tensors(
    tmp_path: Path, template: Template
) -> None:
    data = PLAIN[template.tasks[0]][-1]
    made = _generated(template, data, tmp_path)
    first, second = _adapted(made, data), made.build_model()
    second.load_state_dict(first.state_dict())
    rows = {
        "text-classification": {"message": ["Some words, 2 of them!", "", None, "\ud800"]},
        "image-classification": {"image": [torch.randint(256, (3, 40, 30), dtype=torch.uint8)]},
        "forecasting": Series(known=2, named=True).table(HISTORY),
    }[template.tasks[0]]
    found = _predict(made, second, rows)
    assert found == _predict(made, first, rows)
    assert first.training


@every
def test_adapt_is_deterministic(tmp_path: Path, template: Template) -> None:
    data = PLAIN[template.tasks[0]][-1]
    made = _generated(template, data, tmp_path)
    first, second = (_adapted(made, data).state_dict() for _ in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@every
def test_recipes_are_fields_of_the_job(template: Template) -> None:
    assert set(template.sizes) == {"small", "medium", "large"}
    for size, config in template.sizes.items():
        job: dict[str, Any] = {"name": size, "data": {"uri": "table.csv"}, "train": {}}
        data = PLAIN[template.tasks[0]][0]
        for field, value in template.recipe(data, config).items():
            job["train"][field.removeprefix("train.")] = value
        Job.model_validate(job)


@every
def test_a_template_refuses_data_of_another_form(template: Template) -> None:
    data = case.images().model_copy(update={"inputs": {"inputs": (2, 3)}})
    with pytest.raises(BadInput, match="data: got image-classification with inputs \\[2, 3\\]"):
        template.source(data, template.sizes["small"], HEADER)


@_of("text-classification", "image-classification")
def test_adapt_refuses_longer_class_names(tmp_path: Path, template: Template) -> None:
    data = PLAIN[template.tasks[0]][0]
    made = _generated(template, data, tmp_path)
    assert made.adapt is not None
    with pytest.raises(ValueError, match="'label' has other classes"):
        made.adapt(made.build_model(), *_rows(data), {"label": ["x" * 100] * 3})


@_of("text-classification", "image-classification")
def test_without_rows_there_are_no_predictions(tmp_path: Path, template: Template) -> None:
    data = PLAIN[template.tasks[0]][0]
    made = _generated(template, data, tmp_path)
    column = "message" if data.task == "text-classification" else "image"
    found = _predict(made, _adapted(made, data), {column: []})
    assert found == {"prediction": [], "probability": []}


@text_models
def test_raw_texts_become_tokens(tmp_path: Path, template: Template) -> None:
    data = case.texts(length=4)
    made = _generated(template, data, tmp_path)
    model = _adapted(made, data).eval()
    texts = ["Größe _1 !!", "ONE two three four five", "", "\u0130n it's"]
    tokens = padded(*Tokenizer()(texts), 4).astype("int64")
    with torch.no_grad():
        outputs = model(torch.from_numpy(tokens))
    probability, best = outputs.softmax(1).max(1)
    found = _predict(made, model, {"message": [one or None for one in texts]})
    assert found["prediction"] == [CLASSES[one] for one in best.tolist()]
    assert found["probability"] == pytest.approx(probability.tolist())


def test_bigrams_tell_texts_of_the_same_words_apart(tmp_path: Path) -> None:
    rows = {"small": 0.0, "medium": 0.0}
    for size in rows:
        folder = tmp_path / size
        data = case.texts(length=2)
        made = _generated(templates()["ngram-bag"], data, folder, size)
        inputs = torch.tensor([[1, 2], [2, 1]]).repeat(20, 1)
        targets = torch.tensor([0, 1]).repeat(20)
        model = made.build_model()
        assert made.adapt is not None
        with torch.no_grad():
            made.adapt(model, inputs, targets, {})
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for _ in range(30):
            optimizer.zero_grad()
            loss_function(made, data.task)(model(inputs), targets).backward()
            optimizer.step()
        rows[size] = float((model(inputs).argmax(1) == targets).double().mean())
    assert rows == {"small": 0.5, "medium": 1.0}


@image_models
def test_raw_images_become_pixels(tmp_path: Path, template: Template) -> None:
    data = case.images((1, 8, 8))
    made = _generated(template, data, tmp_path)
    model = _adapted(made, data).eval()
    grey = torch.randint(256, (5, 1, 8, 8), dtype=torch.uint8)
    with torch.no_grad():
        probability, best = model(grey / 255).softmax(1).max(1)
    colour = torch.cat([grey, grey, grey, grey.flip(0)], 1)  # the fourth: transparency
    for images in (grey, colour, grey / 255):
        found = _predict(made, model, {"image": list(images)})
        assert found["prediction"] == [CLASSES[one] for one in best.tolist()]
        assert found["probability"] == pytest.approx(probability.tolist(), abs=1e-5)


@pytest.mark.parametrize("size", [(20, 30), (5, 4)], ids=str)
def test_raw_images_get_the_size_that_training_images_get(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    data = case.images((3, 8, 6))
    model = _adapted(_generated(templates()["residual-network"], data, tmp_path), data)
    raw = torch.randint(256, (*size, 3), dtype=torch.uint8)
    file = tmp_path / "image.png"
    Image.fromarray(raw.numpy()).save(file)
    trained_on = torch.from_numpy(decoded(file, "image.png", ImageShape(3, 8, 6)))
    encoded = model.encode([raw.permute(2, 0, 1)])[0]
    assert torch.allclose(encoded, trained_on / 255, atol=1.01 / 255)


@forecasters
@series
def test_forecasts_from_raw_rows_are_those_from_arrays(
    tmp_path: Path, template: Template, rows: Series
) -> None:
    data = rows.schema()
    made = _generated(template, data, tmp_path)
    model = _adapted(made, data).eval()
    table = rows.table(HISTORY + 3)
    with torch.no_grad():
        outputs = model(rows.window(table))
        every = model(rows.window(table), every=True)
    found = _predict(made, model, table)
    assert found.get("shop") == (NAMES if rows.named else None)
    assert torch.tensor(found["prediction"]).shape == outputs.shape
    for place, name in enumerate(("low", "prediction", "high")):
        assert torch.allclose(torch.tensor(found[name]), every[..., place], rtol=1e-4)
    assert model.train()(rows.window(table)).shape == (*outputs.shape, 3)


@forecasters
@pytest.mark.parametrize("rows", SERIES[:2], ids=str)
def test_time_stamps_of_the_horizon_may_be_left_out(
    tmp_path: Path, template: Template, rows: Series
) -> None:
    data = rows.schema()
    made = _generated(template, data, tmp_path)
    model = _adapted(made, data)
    _learn_the_calendar(model)
    found = _predict(made, model, rows.table(HISTORY, future=0))
    assert found == _predict(made, model, rows.table(HISTORY))


@pytest.mark.parametrize(
    ("months", "days"), [(0, 1), (0, 7), (0, 30), (1, 0), (2, 0), (3, 0), (12, 0)]
)
@pytest.mark.parametrize("start", ["2019-01-01", "2023-08-31", "2024-02-29T12:30", "2023-11-15"])
def test_time_stamps_that_are_left_out_keep_the_step_of_the_calendar(
    tmp_path: Path, months: int, start: str, days: int
) -> None:
    data = Series().schema()
    made = _generated(templates()["dlinear"], data, tmp_path)
    model = _adapted(made, data)
    _learn_the_calendar(model)
    first = np.datetime64(start, "us")
    steps = np.arange(HISTORY + HORIZON)
    if months:  # from the beginning of a month, or back from its end
        month, at_end = first.astype("datetime64[M]"), start in ("2023-08-31", "2024-02-29T12:30")
        whole = (month + months * steps + int(at_end)).astype("datetime64[us]")
        stamps = whole - (month + int(at_end)).astype("datetime64[us]") + first
    else:
        stamps = first + steps * np.timedelta64(days, "D")
    at = [str(one) for one in stamps]
    sold = [float(one % 7) for one in range(HISTORY)]
    found = _predict(made, model, {"at": at[:HISTORY], "sold": sold})
    assert found == _predict(made, model, {"at": at, "sold": [*sold, *[None] * HORIZON]})


@forecasters
def test_the_order_of_rows_does_not_matter(tmp_path: Path, template: Template) -> None:
    rows = Series(known=1)
    made = _generated(template, rows.schema(), tmp_path)
    model = _adapted(made, rows.schema())
    table = rows.table(HISTORY)
    turned = {name: values[::-1] for name, values in table.items()}
    assert _predict(made, model, turned) == _predict(made, model, table)


@forecasters
@pytest.mark.parametrize("change", ["short", "gap", "no horizon"])
def test_forecasts_need_a_history_and_the_known_columns(
    tmp_path: Path, template: Template, change: str
) -> None:
    rows = Series(known=1)
    made = _generated(template, rows.schema(), tmp_path)
    table = rows.table(HISTORY - (change == "short"), future=0 if change == "no horizon" else 5)
    if change == "gap":
        table["sold"][3] = None
    with pytest.raises(ValueError, match=f"'sold': .* values; allowed: {HISTORY}, then {HORIZON}"):
        _predict(made, _adapted(made, rows.schema()), table)


@forecasters
def test_unknown_series_have_a_forecast_and_too_many_are_refused(
    tmp_path: Path, template: Template
) -> None:
    rows = Series(named=True)
    made = _generated(template, rows.schema(), tmp_path)
    model = _adapted(made, rows.schema())
    table = rows.table(HISTORY)
    table["shop"] = [f"new {name}" for name in table["shop"]]
    assert _predict(made, model, table)["shop"] == [f"new {name}" for name in NAMES]
    assert made.adapt is not None
    with pytest.raises(ValueError, match="'shop' has 4 values; this file is for 3"):
        made.adapt(model, *_rows(rows.schema()), {"shop": [*NAMES, "south"]})


@forecasters
def test_forecasts_follow_a_season_and_the_level_of_the_history(
    tmp_path: Path, template: Template
) -> None:
    rows = Series()
    data = rows.schema()
    made = _generated(template, data, tmp_path)
    inputs, _ = rows.windows(600)
    wave = torch.sin(torch.arange(600 + HISTORY + HORIZON) * torch.pi / 3)
    inputs["history"] = wave.unfold(0, HISTORY, 1)[:600]
    targets = wave[HISTORY:].unfold(0, HORIZON, 1)[:600]
    model = made.build_model()
    assert made.adapt is not None
    with torch.no_grad():
        made.adapt(model, inputs, targets, {})
        shifted = inputs | {"history": 1000 * inputs["history"] + 5000}
        found = model.eval()(shifted)
    assert torch.allclose(found, 1000 * targets + 5000, atol=20)
