"""The job file: every field is read, and errors name the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trainwright.tasks.errors import BadInput
from trainwright.tasks.recommend.templates import templates
from trainwright.tasks.runs.artefacts.run_job import RunJob
from trainwright.tasks.spec.job import SIZES, TEMPLATES, Job, load_job
from trainwright.tasks.spec.train_spec import LayoutSpec

EXAMPLE = """
name: digits
pool: ../pools/two-cpus.yaml
priority: 0
data:
  {uri: builtin:digits, target: label, task: image-classification, validation_fraction: 0.2,
   expectations: suite.json, missing: auto, split: group, split_by: patient, stratify: auto,
   image_size: [8, 8], augment: none, channels: auto,
   csv: {separator: tab, decimal: ",", thousands: space, encoding: latin-1, text_columns: [zip]}}
model: {source: cnn.py, config: {width: 64}}
recommend: {templates: [linear], top: 3, probe: false}
train:
  {epochs: 5, global_batch_size: auto, batch_bounds: [64, 1024],
   optimizer: {name: adamw, weight_decay: 0.01}, learning_rate: auto, learning_rate_rule: auto,
   schedule: cosine, clip_norm: 1.0, precision: fp32, seed: 0, backend: auto,
   adaptive_split: true, adaptive_batch: false,
   checkpoint: {every_steps: 50, keep_last: 3, keep_best: true},
   target: {metric: accuracy, value: 0.97}}
objective: {minimize: energy, deadline: 30m, budget: 5.0, confidence: 0.9}
devices: {types: [cpu], hosts: [], ids: [], exclude: [], min_count: 1, max_count: 4}
schedule: {cron: "0 3 * * *", on_new_data: true}
promotion: {alias: production, require_approval: false, only_if_better: accuracy}
export: [onnx]
"""


def write(folder: Path, **changes: Any) -> Path:
    """A small valid job with some fields changed; None removes a field."""
    values: dict[str, Any] = {
        "name": "small",
        "data": {"uri": "builtin:digits"},
        "model": {"source": "m.py"},
    } | changes
    path = folder / "job.yaml"
    path.write_text(
        yaml.safe_dump({name: value for name, value in values.items() if value is not None})
    )
    return path


def test_every_field_of_the_contract_is_read_and_paths_are_relative_to_the_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "jobs").mkdir()
    path = tmp_path / "jobs" / "job.yaml"
    path.write_text(EXAMPLE)
    job = load_job(path)
    assert job.objective.deadline == 1800
    assert job.pool == str(tmp_path / "pools" / "two-cpus.yaml")
    assert job.model is not None
    assert job.model.source == str(tmp_path / "jobs" / "cnn.py")
    assert job.data.expectations == str(tmp_path / "jobs" / "suite.json")
    assert job.data.uri == "builtin:digits"
    csv = job.data.csv
    assert (csv.separator, csv.thousands, csv.encoding) == ("\t", " ", "iso8859-1")


def test_a_job_read_back_from_the_run_folder_is_equal(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(EXAMPLE)
    job = load_job(tmp_path / "job.yaml")
    again = RunJob.model_validate_json(RunJob.of(job).model_dump_json())
    assert again.model_dump(exclude={"schema_version", "given"}) == job.model_dump()
    assert {"train.epochs", "train.optimizer.name", "train.target.value"} <= set(again.given)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nmae": "x"}, "nmae: unknown field; allowed: name, pool, "),
        ({"train": {"epoch": 3}}, "train.epoch: unknown field; allowed: epochs, "),
        ({"train": {"epoch": 3}}, "; did you mean epochs?"),
        ({"data": {"uri": "a.csv", "csv": {"separator": "::"}}}, "data.csv.separator: got '::'; "),
        ({"data": {"uri": "a.csv", "csv": {"thousands": "_"}}}, "data.csv.thousands: got '_'; "),
        ({"data": {"uri": "a.csv", "csv": {"encoding": "utf-7b"}}}, "such as cp1252 or utf-16"),
        (
            {"data": {"uri": "a.csv", "csv": {"decimal": ",", "thousands": ","}}},
            "thousands: another mark than decimal",
        ),
        ({"train": {"epochs": "many"}}, "train.epochs: got 'many'; allowed:"),
        ({"train": {"epochs": True}}, "train.epochs: got true; allowed: a whole number"),
        ({"train": {"epochs": "5"}}, "train.epochs: got '5'; allowed: a whole number"),
        (
            {"train": {"global_batch_size": True}},
            "train.global_batch_size: got true; allowed: a whole number or auto",
        ),
        (
            {"train": {"batch_bounds": [True, True]}},
            "train.batch_bounds: got [True, True]; allowed: [least, greatest] with",
        ),
        (
            {"train": {"checkpoint": {"keep_best": "yes"}}},
            "keep_best: got 'yes'; allowed: true or false",
        ),
        (
            {"train": {"target": {"value": 97}}},
            "train.target.value: got 97; allowed: a share above 0, up to 1",
        ),
        (
            {"train": {"target": {"value": 0}}},
            "train.target.value: got 0; allowed: a share above 0, up to 1",
        ),
        (
            {"train": {"target": {"metric": "auc", "value": 95}}},
            "train.target.value: got 95; allowed: a share above 0, up to 1",
        ),
        (
            {
                "data": {"uri": "a.csv", "task": "tabular-regression"},
                "train": {"target": {"value": 0.9}},
            },
            "train.target.metric: got 'accuracy'; "
            "allowed for tabular-regression: loss, rmse, mae, r2",
        ),
        (
            {
                "data": {"uri": "builtin:digits", "task": "image-classification"},
                "promotion": {"only_if_better": "rmse"},
            },
            "promotion.only_if_better: got 'rmse'; "
            "allowed for image-classification: accuracy, loss, f1, auc, log_loss",
        ),
        ({"train": {"epochs": 0}}, "train.epochs: got 0; allowed: greater than or equal to 1"),
        (
            {"train": {"global_batch_size": -4}},
            "train.global_batch_size: got -4; allowed: more than zero, or auto",
        ),
        (
            {"train": {"batch_bounds": [9, 3]}},
            "train.batch_bounds: got [9, 3]; allowed: [least, greatest] with",
        ),
        (
            {
                "train": {
                    "adaptive_batch": True,
                    "global_batch_size": 512,
                    "batch_bounds": [64, 128],
                }
            },
            "global_batch_size of at most 128, the upper bound of batch_bounds, not 512",
        ),
        (
            {"train": {"layout": "average"}},
            "train.layout: got 'average'; allowed: a mapping of fields or 'auto', 'data-parallel', "
            "'late-multiply', 'sharded', 'hybrid', 'averaging', 'mixed' or 'pipeline'",
        ),
        (
            {"train": {"layout": {"average_every": 0}}},
            "train.layout.average_every: got 0; allowed: greater than or equal to 1",
        ),
        (
            {"train": {"layout": {"outer": "adam"}}},
            "train.layout.outer: got 'adam'; allowed: 'none', 'block-momentum' or 'nesterov'",
        ),
        (
            {"train": {"layout": {"name": "mixed", "local_batch": 8}}},
            "layout.local_batch (8) with layout.name averaging only",
        ),
        (
            {"train": {"layout": {"average_every": 8, "dense": "rows"}}},
            "layout.dense rows with layout.name mixed only",
        ),
        (
            {"train": {"layout": {"dense": "rows", "factor_type": "bf16"}}},
            "layout.factor_type bf16 with layout.dense factors or auto only; rows sends no factors",
        ),
        (
            {"train": {"layout": {"average_every": 8, "factor_type": "bf16"}}},
            "layout.factor_type bf16 without the layout averaging, which sends no factors",
        ),
        (
            {"train": {"layout": "averaging", "adaptive_batch": True}},
            "adaptive_batch false with the layout averaging",
        ),
        (
            {"train": {"layout": {"stages": 2, "average_every": 8}}},
            "train.layout.stages: got 2 with average_every: 8; allowed: fields of pipelines or of "
            "averages, not of both",
        ),
        (
            {"train": {"layout": {"stages": 1}}},
            "train.layout.stages: got 1; allowed: 2 or more, as pipelines have several stages",
        ),
        (
            {"train": {"layout": {"name": "data-parallel"}}},
            "train.layout.name: got 'data-parallel'; allowed: auto, averaging, mixed or pipeline; "
            "data-parallel has no fields: train.layout: data-parallel",
        ),
        (
            {"train": {"layout": "pipeline", "adaptive_batch": True}},
            "train.adaptive_batch: got true; allowed: false with pipelines, whose micro-batches",
        ),
        (
            {"train": {"layout": {"schedule": "fast"}}},
            "train.layout.schedule: got 'fast'; allowed: 'auto', 'gpipe', '1f1b' or 'zero-bubble'",
        ),
        ({"train": {"faults": {"stall_timeout": "1ms"}}}, "train.faults.stall_timeout: got "),
        (
            {"train": {"learning_rate": -1.0}},
            "train.learning_rate: got -1.0; allowed: more than zero, up to 1000000, or auto",
        ),
        ({"train": {"learning_rate": 1e300}}, "train.learning_rate: got 1e+300; allowed: more"),
        ({"train": {"optimizer": {"weight_decay": 1e300}}}, "weight_decay: got 1e+300; allowed:"),
        *[
            ({"train": {"checkpoint": {name: 10**10}}}, f"{name}: got 10000000000; allowed: less")
            for name in ("every_steps", "keep_last", "keep_every")
        ],
        (
            {"objective": {"deadline": "3651d"}},
            "objective.deadline: got '3651d'; allowed: more than zero, up to 3650d",
        ),
        ({"queue_timeout": "1e300s"}, "queue_timeout: got '1e300s'; allowed: up to 3650d"),
        (
            {
                "data": {"uri": "d.csv", "task": "tabular-regression"},
                "train": {"early_stopping": {"patience": 3, "metric": "accuracy"}},
            },
            "train.early_stopping.metric: got 'accuracy'; allowed for tabular-regression: loss, ",
        ),
        (
            {
                "data": {"uri": "d.csv", "task": "forecasting"},
                "train": {"label_smoothing": 0.1},
            },
            "train.label_smoothing: got 0.1; allowed for forecasting: 0, as it has no classes",
        ),
        ({"train": {"label_smoothing": 1.0}}, "train.label_smoothing: got 1.0; allowed: less than"),
        ({"train": {"early_stopping": {}}}, "train.early_stopping.patience: "),
        (
            {"train": {"optimizer": {"decay_exclude": "norms"}}},
            "train.optimizer.decay_exclude: got 'norms'; allowed: 'none' or 'vectors'",
        ),
        ({"objective": {"budget": 1e-300}}, "objective.budget: got 1e-300; allowed: greater"),
        ({"objective": {"budget": 1e13}}, "objective.budget: got 10000000000000.0; allowed: less"),
        (
            {"promotion": {"only_if_better": "xyz"}},
            "promotion.only_if_better: got 'xyz'; allowed: 'accuracy', 'loss', 'f1', 'auc', ",
        ),
        ({"export": ["coreml"]}, "export.to.0: got 'coreml'; allowed: "),
        ({"export": {"tolerance": 1.5}}, "export.tolerance: got 1.5; allowed: less than 1"),
        ({"export": {"to": ["rtl"], "fine_tune": True}}, "fine_tune is for onnx-int8, got to: "),
        (
            {"train": {"learning_rate": ".nan"}},
            "train.learning_rate: got '.nan'; allowed: a finite number or auto",
        ),
        (
            {"train": {"clip_norm": "-.Inf"}},
            "train.clip_norm: got '-.Inf'; allowed: a finite number",
        ),
        ({"train": {"learning_rate": float("inf")}}, "train.learning_rate"),
        ({"name": "../../etc"}, "name: got '../../etc'; allowed:"),
        ({"name": "<script>"}, "name: got '<script>'"),
        ({"name": "a" * 64}, "name: got "),
        ({"name": ""}, "name: got ''"),
        ({"name": None}, "name: required field is missing"),
        ({"data": None}, "data: required field is missing"),
        (
            {"data": {"uri": "builtin:digits", "validation_fraction": 1.5}},
            "data.validation_fraction: got 1.5",
        ),
        (
            {"objective": {"deadline": 30}},
            "objective.deadline: got 30; allowed: a number with its unit",
        ),
        (
            {"objective": {"minimize": "joy"}},
            "objective.minimize: got 'joy'; allowed: 'energy', 'cost' or 'time'",
        ),
        ({"objective": {"budget": -1}}, "objective.budget: got -1"),
        (
            {"schedule": {"cron": "5-1 * * * *"}},
            "schedule.cron: got '5-1 * * * *'; allowed: a range that begins with its lower end",
        ),
        ({"schedule": {"cron": "0 0 * nov-feb *"}}, "lower end, not nov-feb"),
        ({"schedule": {"cron": "*/99 * * * *"}}, "a step of at most 59 in this field, not */99"),
        ({"schedule": {"cron": "0 1,2/24 * * *"}}, "a step of at most 23 in this field, not 2/24"),
        ({"schedule": {"cron": "0 0 30 2 *"}}, "a day that the month has, not day 30 of month 2"),
        ({"schedule": {"cron": "0 0 31 4,jun *"}}, "not day 31 of month 4,jun"),
        ({"schedule": {"cron": "0 0 * *"}}, "allowed: the five cron fields"),
        (
            {"devices": {"min_count": 3, "max_count": 2}},
            "max_count of at least min_count (3), not 2",
        ),
    ],
)
def test_a_wrong_field_gives_one_line_with_field_given_and_allowed(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadInput) as caught:
        load_job(write(tmp_path, **changes))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "cron",
    [
        "0 3 * * *",
        "*/59 5/10 1-31/31 jan-dec/12 *",
        "0 0 29 2 *",
        "0 0 30,31 feb,mar *",
        "0 0 31 2 mon",
        "0 0 * * SAT-SUN",
        "0 0 * * 5-7",
    ],
)
def test_a_cron_schedule_that_runs_is_accepted(tmp_path: Path, cron: str) -> None:
    job = load_job(write(tmp_path, schedule={"cron": cron}))
    assert job.schedule is not None
    assert job.schedule.cron == cron


def test_other_wrong_fields_are_named_too(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"\(also wrong: nmae\)"):
        load_job(write(tmp_path, nmae="x", train={"epochs": 0}))


def test_every_field_has_help_for_the_form() -> None:
    def bare(model: Any, path: str = "") -> list[str]:
        missing = []
        for name, field in model.model_fields.items():
            inner = field.annotation
            nested = [
                one
                for one in (inner, *getattr(inner, "__args__", ()))
                if hasattr(one, "model_fields")
            ]
            if nested:
                missing += bare(nested[0], f"{path}{name}.")
            elif not field.description:
                missing.append(path + name)
        return missing

    assert bare(Job) == []


@pytest.mark.parametrize(
    "bounds",
    [
        ["a", 3],
        [True, 3],
        [64.5, 128],
        [0, 5],
        [9, 5],
        [1, 2, 3],
        [5],
        64,
        "64",
        None,
        {"least": 1},
        [1, float("inf")],
    ],
)
def test_an_error_in_batch_bounds_states_the_whole_rule(tmp_path: Path, bounds: object) -> None:
    with pytest.raises(
        BadInput,
        match=r"train\.batch_bounds: got .*; allowed: \[least, greatest\] with 1 <= .*, both whole",
    ):
        load_job(write(tmp_path, train={"batch_bounds": bounds}))


def test_batch_bounds_may_be_whole_numbers_written_as_floats() -> None:
    job = Job.model_validate(
        {"name": "j", "data": {"uri": "builtin:digits"}, "train": {"batch_bounds": (16.0, 64)}}
    )
    assert job.train.batch_bounds == (16, 64)


def test_set_changes_fields_by_their_dotted_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path)
    changes = [
        "train.epochs=3",
        "train.optimizer.name=sgd",
        "data.uri=d.csv",
        "devices.types=[cpu]",
    ]
    job = load_job(path, changes=[*changes, "train.target={metric: accuracy, value: 0.9}"])
    assert (job.train.epochs, job.train.optimizer.name) == (3, "sgd")
    assert job.data.uri == str(tmp_path / "d.csv")
    assert job.devices.types == ["cpu"]
    assert job.train.target is not None
    assert load_job(path, changes=["model=null"]).model is None


def test_a_part_of_a_layout_is_set_also_where_the_file_says_auto(tmp_path: Path) -> None:
    path = write(tmp_path, train={"layout": "auto"})
    layout = load_job(
        path, changes=["train.layout.dense=rows", "train.layout.chunk_bytes=65536"]
    ).train.layout
    assert isinstance(layout, LayoutSpec)
    assert (layout.dense, layout.chunk_bytes) == ("rows", 65536)
    assert load_job(path, changes=["train.layout=sharded"]).train.layout == "sharded"


@pytest.mark.parametrize("layout", ["fast", "", 3, ["auto"], None])
def test_a_layout_of_no_kind_gives_one_line_with_words_and_mapping(
    tmp_path: Path, layout: object
) -> None:
    with pytest.raises(BadInput) as refused:
        load_job(write(tmp_path, train={"layout": layout}))
    line = str(refused.value)
    assert "train.layout: got " in line
    assert "; allowed: a mapping of fields or 'auto', 'data-parallel', 'late-multiply'" in line
    assert "also wrong" not in line


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("train.epochs", "--set: got 'train.epochs'; allowed: FIELD=VALUE"),
        ("train..epochs=3", "--set: got 'train..epochs=3'; allowed: FIELD=VALUE"),
        ("name.first=x", "--set name.first: name is text, which has no fields"),
        ("train.epochs=many", "--set train.epochs: got 'many'; allowed: a whole number"),
        ("train.epoch=3", "--set train.epoch: unknown field; allowed: "),
        ("train={epochs: many}", "--set train.epochs: got 'many'; allowed: a whole number"),
        ("train.target={value: 97}", "--set train.target.value: got 97; allowed: a share"),
        (
            "train.layout=fast",
            "--set train.layout: got 'fast'; allowed: a mapping of fields or 'au",
        ),
        ("train.layout={dense: some}", "--set train.layout.dense: got 'some'; allowed: 'auto', 's"),
        ("train.layout.dense=some", "--set train.layout.dense: got 'some'; allowed: 'auto', 'sum'"),
        ("train.layout.dens=rows", "--set train.layout.dens: unknown field; allowed: "),
        ("train.seed=[", "--set train.seed: not valid YAML or JSON"),
        ("schedule.cron=* * * * *", "but found ' ' (quote the value)"),
        ("schedule.cron=@daily", "cannot start any token (quote the value)"),
        ("train.epochs=null", "train.epochs: got null; allowed: a whole number"),
        ("objective.deadline={a: 1}", "deadline: got a mapping of fields; allowed: a number with"),
        ("train={epochs: 3", "--set train: not valid YAML or JSON (line 1, column 11)"),
        ('data.uri="a\\0b"', "--set data.uri: got 'a\\x00b'; it can't be resolved to a path"),
        (
            "model={source: m.py, config: {width: {a: 1}}}",
            "--set model.config.width: got a mapping of fields; "
            "allowed: text, a whole number, a number, true or false or a list",
        ),
    ],
)
def test_an_invalid_assignment_gives_one_line(tmp_path: Path, change: str, says: str) -> None:
    with pytest.raises(BadInput) as raised:
        load_job(write(tmp_path), changes=[change])
    assert says in str(raised.value)


@pytest.mark.parametrize("name", ["foo", "linear-tiny", "linear-", ""])
def test_a_template_that_does_not_exist_is_refused_when_the_job_is_read(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(
        BadInput, match=r"recommend\.templates: got '.*'; allowed: linear, .*n-hits"
    ):
        load_job(write(tmp_path, recommend={"templates": ["linear-small", name]}))


def test_the_names_of_templates_are_those_of_the_package() -> None:
    found = templates()
    assert tuple(found) == TEMPLATES
    assert {tuple(one.sizes) for one in found.values()} == {SIZES}
