"""Step `analyze`: both engines give equal results; the page works offline and escapes text."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import cloudpickle
import doors
import pandas as pd
import pytest
from browsing import browser, refused_by_axe
from drift_case import drifted
from finished_run import (
    begin_run,
    finished_training,
    local_path,
    write_export,
    write_metrics,
    write_outcome,
)
from layout_cases import LOSS, dense_layer
from layout_plans import HEAVY, plan_and_estimate
from recommended_model import recommendation
from typer.testing import CliRunner

from trainwright.estimator.curves import Affine, Interval
from trainwright.tasks.analyze import history as step
from trainwright.tasks.analyze.history import (
    analyze,
    device_use,
    history,
    with_devices,
)
from trainwright.tasks.analyze.prediction_check import predicted_and_measured
from trainwright.tasks.analyze.report_charts import validation_metrics
from trainwright.tasks.cli.main import app
from trainwright.tasks.plots.colours import BLUE, COLOURS, DARK, LINE, MUTED, TEXT
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline, Stage
from trainwright.tasks.runs.artefacts.learning_rate_search import (
    CurveFit,
    LearningRatePoint,
    LearningRateSearch,
    LearningRateTrial,
)
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.recommendation import BoostedTrees
from trainwright.tasks.runs.artefacts.report_figures import Report
from trainwright.tasks.runs.artefacts.training_result import (
    ClassMetrics,
    Confusion,
    EarlyStop,
    Result,
)
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.runs.run import Run, list_runs
from trainwright.tasks.store import save_model, seal, verify


@pytest.fixture
def store(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


class _Page(HTMLParser):
    """The resources that a page would load, its visible text, and its elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.elements: list[str] = []
        self.styles = self.text = ""
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        self.elements.append(tag)
        self.loads += [
            value or ""
            for name, value in attrs
            if name in ("src", "href", "srcset", "data", "action")
        ]

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "style":
            self.styles += data
        elif self._inside != "script":
            self.text += data


def _page(run: Run) -> _Page:
    return _Page(run.objects.get("report/report.html").decode())


def _no_nan(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    return [
        {
            name: pytest.approx(v, rel=1e-12) if isinstance(v, float) else v
            for name, v in row.items()
        }
        for row in rows
    ]


def test_dask_and_pandas_give_the_same_device_use(store: str) -> None:
    result = finished_training(store).read(Result)
    chance = random.Random(0)
    table = pd.DataFrame(
        {
            "step": [k // 2 for k in range(60_000)],
            "rank": [k % 2 for k in range(60_000)],
            "batch_size": [chance.randint(1, 64) for _ in range(60_000)],
            "compute_s": [chance.random() for _ in range(60_000)],
            "wait_s": [chance.random() for _ in range(60_000)],
        }
    )
    table["step_time_s"] = table["compute_s"] + table["wait_s"]
    dask, plain = (
        device_use(with_devices(table, result), result, engine) for engine in ("dask", "pandas")
    )
    assert dask == _no_nan(plain)


def test_dask_and_pandas_give_the_same_history(store: str) -> None:
    runs = [
        finished_training(store, name, number)
        for number, name in enumerate(("one", "two", "one", "one"))
    ]
    runs.append(begin_run(store, "two", 9))
    assert history(runs, "dask") == _no_nan(history(runs, "pandas"))


def test_device_use_is_the_sum_of_the_rows(store: str) -> None:
    run = begin_run(store, "small", 1)
    rows = write_metrics(run, 30)
    write_outcome(run, metrics={"accuracy": 0.95})
    for found in analyze(run, store).devices:
        own = [row for row in rows if row["rank"] == found["rank"]]
        total = sum(row["step_time_s"] for row in own)
        assert found["samples"] == sum(row["batch_size"] for row in own)
        assert found["samples_per_s"] == pytest.approx(found["samples"] / total)
        assert found["computing"] == pytest.approx(sum(row["compute_s"] for row in own) / total)
        assert found["computing"] + found["waiting"] == pytest.approx(1.0)


def test_steps_of_a_rank_count_for_its_device_at_that_time(store: str) -> None:
    result = finished_training(store).read(Result)
    first, second = (device.id for device in result.devices)
    rows = pd.DataFrame(
        [
            {
                "step": step,
                "rank": rank,
                "batch_size": 10 + rank,
                "compute_s": 0.01,
                "step_time_s": 0.02,
            }
            for rank in (0, 1)
            for step in range(4)
        ]
    )
    earlier = with_devices(rows, result)
    assert earlier["device"].tolist() == 4 * [first] + 4 * [second]
    of_the_other = rows.assign(device=4 * ["gone"] + 2 * [first] + 2 * [None])
    found = {
        one["device"]: one
        for one in device_use(with_devices(of_the_other, result), result, "pandas")
    }
    assert (found[first]["samples"], found[second]["samples"]) == (22, 22)


def test_epochs_of_all_parts_are_in_order(store: str) -> None:
    run = finished_training(store)
    epochs = analyze(run, store).epochs
    assert [row["epoch"] for row in epochs] == [0, 1, 2]
    assert [row["accuracy"] for row in epochs] == pytest.approx([0.9, 0.92, 0.94])


def test_predicted_and_measured_values_have_an_error_and_whether_the_interval_held(
    store: str,
) -> None:
    run = finished_training(store)
    rows = {
        row["quantity"]: row
        for row in predicted_and_measured(run.read(Result), run.find(Estimate), run.find(Plan))
    }
    duration, energy = rows["duration"], rows["energy"]
    assert (duration["predicted"], duration["measured"], duration["inside"]) == (25.0, 20.0, True)
    assert duration["error"] == pytest.approx(0.25)
    assert (energy["error"], energy["inside"]) == (pytest.approx(-0.5), False)
    assert "cost" not in rows
    assert rows["memory of here/cpu-0"]["inside"] is True
    (own,) = [name for name in rows if name.startswith("own step time of here/cpu-1, ")]
    assert own.endswith(f", {run.read(Result).devices[1].batch_size} samples")
    assert rows[own]["predicted"] == pytest.approx(0.016)
    curve = run.read(Estimate).find(run.read(Plan).devices[1])
    assert curve is not None
    assert curve.cores == 0.5  # at best as fast as on a whole core
    assert rows[own]["low"] == pytest.approx(0.5 * 0.016 * curve.low_factor)


def _with_duration(run: Run, **predicted: float) -> Result:
    """The run's result, with another predicted duration."""
    result = run.read(Result)
    assert result.predicted is not None
    changed = result.predicted.model_copy(update={"duration_s": Interval(**predicted)})
    return result.model_copy(update={"predicted": changed})


def test_a_configured_step_time_has_no_interval(store: str) -> None:
    run = finished_training(store)
    exact = _with_duration(run, median=25.0, low=25.0, high=25.0)
    rows = predicted_and_measured(exact, run.find(Estimate), run.find(Plan))
    duration = next(row for row in rows if row["quantity"] == "duration")
    assert (duration["error"], duration["inside"]) == (pytest.approx(0.25), None)


def test_an_interval_of_more_than_a_millionfold_says_nothing(store: str) -> None:
    run = finished_training(store)
    run.write(_with_duration(run, median=3e40, low=2.0, high=1e90))
    rows = analyze(run).predicted_and_measured
    duration = next(row for row in rows if row["quantity"] == "duration")
    assert duration["inside"] is None
    assert next(row for row in rows if row["unit"] == "B")["inside"] is True  # only a bound
    text = _page(run).text
    assert "not known" in text
    assert max(map(len, re.findall(r"\d+", text))) < 25


def test_the_memory_of_accumulated_steps_is_compared_with_one_micro_batch_plus_gradients(
    store: str,
) -> None:
    run = finished_training(store)
    result, estimate, plan = run.read(Result), run.read(Estimate), run.read(Plan)
    curves = [
        one.model_copy(update={"peak_memory_bytes": Affine(fixed=0.0, per_sample=1e5)})
        for one in estimate.curves
    ]
    estimate = estimate.model_copy(update={"curves": curves})
    whole, pieces = (
        {
            row["quantity"]: row
            for row in predicted_and_measured(
                result, estimate, plan.model_copy(update={"accumulation": count})
            )
        }
        for count in (1, 4)
    )
    for device in result.devices:
        name = f"memory of {device.id}"
        assert whole[name]["predicted"] == pytest.approx(1e5 * device.batch_size)
        assert pieces[name]["predicted"] == pytest.approx(
            1e5 * device.batch_size / 4 + estimate.gradient_bytes
        )


def test_a_device_that_recomputes_is_not_compared_with_the_plain_step(store: str) -> None:
    run = finished_training(store)
    plan = run.read(Plan)
    first, *others = (device.id for device in plan.devices)
    layout = Layout(
        pipelines=[
            Pipeline(
                micro_batches=[device.batch_size],
                stages=[
                    Stage(
                        device=device.id,
                        layers=["net"],
                        recompute=["net"] if device.id == first else [],
                    )
                ],
            )
            for device in plan.devices
        ]
    )
    named = [
        row["quantity"]
        for row in predicted_and_measured(
            run.read(Result), run.find(Estimate), plan.model_copy(update={"layout": layout})
        )
    ]
    assert f"memory of {first}" not in named
    assert all(f"memory of {other}" in named for other in others)


def test_only_earlier_runs_are_compared_newest_first(store: str) -> None:
    runs = [finished_training(store, "small", number) for number in (1, 2, 3)]
    report = analyze(runs[1], store)
    assert [row["run"] for row in report.history] == [runs[1].uri, runs[0].uri]
    assert report.runs_compared == 1


def test_unfinished_and_damaged_runs_are_listed_as_such(store: str) -> None:
    begin_run(store, "small", 1)
    for number, key in ((2, "result.json"), (3, "status.json")):
        damaged = local_path(finished_training(store, "small", number), key)
        damaged.write_bytes(damaged.read_bytes()[:50])
    local_path(finished_training(store, "small", 4), "status.json").unlink()
    run = finished_training(store, "small", 5)
    report = analyze(run, store)
    states = {row["id"]: row["state"] for row in report.history[1:]}
    assert [states[key] for key in sorted(states)] == ["running", "damaged", "damaged", "damaged"]
    assert _page(run).text.count("smalldamaged") == 3  # job and state are in adjacent cells


def test_the_report_equals_the_returned_one_and_is_sealed(store: str) -> None:
    run = finished_training(store)
    save_model(run)
    seal(run)
    report = analyze(run, store)
    assert run.read(Report) == report
    files = json.loads(run.objects.get("report/manifest.json"))["files"]
    assert files.keys() == {"report.html", "report.json"}
    for name, sealed in files.items():
        assert sealed["sha256"] == hashlib.sha256(run.objects.get(f"report/{name}")).hexdigest()
    verify(run)


def test_a_second_analysis_gives_the_same_numbers(store: str) -> None:
    run = finished_training(store)
    assert analyze(run, store) == analyze(run, store)


def test_the_page_is_self_contained_and_shows_the_numbers(store: str) -> None:
    earlier, run = (finished_training(store, "small", number) for number in (1, 2))
    report = analyze(run, store)
    page = _page(run)
    assert page.loads == []
    assert not re.search(r"@import|url\(\s*['\"]?(?!data:)", page.styles)
    suite = "suite inferred, version 0123456789ab"
    assert "Compared with 1 earlier run" in page.text
    for shown in (
        "0.9500",
        "20.0 s",
        "25.0 s",
        "1 kJ",
        "here/cpu-0",
        earlier.id,
        "32 : 16",
        suite,
        "energy, by datasheet",
    ):
        assert shown in page.text, shown
    assert f"{report.devices[0]['samples']:,}" in page.text


def fully_reported(store: str) -> Run:
    """A run, the second of its job, whose report has each chart and picture."""
    _, run = (finished_training(store, "small", number) for number in (1, 2))
    points = [
        LearningRatePoint(learning_rate=rate, loss=loss, smoothed_loss=loss)
        for rate, loss in ((0.001, 2.0), (0.01, 1.0), (0.1, 3.0))
    ]
    fit = CurveFit(
        curve="loss", kind="polynomial", coefficients=[1.0, 0.0], low=0.001, high=0.1, r2=0.9
    )
    trial = LearningRateTrial(learning_rate=0.01, loss=0.9, steps=10)
    ramp = {"source": "searched", "points": points, "fits": [fit], "trials": [trial]}
    run.write(run.read(LearningRateSearch).model_copy(update=ramp))
    drift = drifted(store, "colour", "b")
    run.write(run.read(Validation).model_copy(update={"drift": drift}))
    for artefact in plan_and_estimate(HEAVY):
        run.write(artefact)
    run.write(recommendation())
    write_export(run)
    analyze(run, store)
    return run


def test_each_colour_of_a_chart_has_a_dark_one(store: str) -> None:
    run = fully_reported(store)
    page = run.objects.get("report/report.html").decode()
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page)
    assert found is not None
    drawn = {item["target_id"] for item in json.loads(found[1])}
    names = ("predicted", "losses", "validation", "steps", "ramp", "history")
    assert drawn == {f"chart-{name}" for name in names}
    assert all(f'id="{target}"' in page for target in drawn)
    used = set(re.findall(r'"(#[0-9a-fA-F]{6})"', found[1]))
    assert {TEXT, MUTED, LINE, BLUE} <= used <= DARK.keys()


@pytest.mark.slow
def test_axe_finds_nothing_to_refuse_in_the_report_in_either_theme(
    store: str, tmp_path: Path
) -> None:
    run = fully_reported(store)
    file = tmp_path / "report.html"
    file.write_bytes(run.objects.get("report/report.html"))
    with browser() as chromium:
        page = chromium.new_page()
        page.goto(file.as_uri())
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            ink = getattr(COLOURS["text"], theme)
            page.wait_for_function(
                "ink => Bokeh.documents.at(-1)?.roots()[0].title.text_color == ink", arg=ink
            )
            page.wait_for_selector(".bk-Figure")
            assert refused_by_axe(page) == [], theme


def test_the_layout_is_on_the_page_by_layer_with_others_and_a_step(store: str) -> None:
    run = finished_training(store)
    analyze(run, store)
    assert "Layout" not in _page(run).text
    plan, estimate = plan_and_estimate(HEAVY)
    run.write(plan)
    run.write(estimate)
    analyze(run, store)
    text = _page(run).text
    assert f"Layout{plan.layout_in_words} ({plan.layout_rule})" in text
    for group in plan.by_layer:
        assert group.why in text
    for other in plan.alternatives:
        assert not other.layout_in_words or f"{other.layout_in_words}" in text
    assert "one step, rank by rank" in text
    assert _page(run).loads == []


def test_a_long_table_of_layers_is_folded_and_a_missing_timeline_has_its_reason(store: str) -> None:
    run = finished_training(store)
    many = [dense_layer(f"fc{size}", 4096, size) for size in range(600, 1600, 100)]
    plan, estimate = plan_and_estimate([*many, LOSS])
    run.write(plan)
    run.write(estimate.model_copy(update={"layers": []}))
    analyze(run, store)
    text = _page(run).text
    assert len(plan.by_layer) == 10
    assert "by layer, 10 groups" in text
    assert "timeline: none, as the estimate does not say what each layer costs" in text


def test_exports_are_on_the_page_with_a_link_also_if_they_were_made_later(
    store: str, tmp_path: Path
) -> None:
    run = finished_training(store)
    save_model(run)
    seal(run)
    analyze(run, store)
    before = run.objects.get("report/report.html")
    assert "Exports" not in _page(run).text
    write_export(run)
    saved = tmp_path / "saved.html"
    done = CliRunner().invoke(app, ["show", run.uri, "--report", str(saved)])
    assert done.exit_code == 0, done.output
    assert re.search(r"exported as onnx +accuracy 0\.9500", done.output)
    assert f"{run.uri}/export/onnx" in "".join(done.output.split())
    assert run.objects.get("report/report.html") == before
    analyze(run, store)
    for page in (_Page(saved.read_text()), _page(run)):
        assert page.loads == [f"{run.uri}/export/onnx/report.html"]
        assert "Exportskindmetrictrainedexportedsizepageonnxaccuracy0.95000.9500" in page.text


def test_a_damaged_export_is_said_on_the_page(store: str) -> None:
    run = finished_training(store)
    write_export(run)
    run.objects.delete("export/onnx/report.json")
    analyze(run, store)
    assert "export/onnx/report.json: missing; " in _page(run).text


def test_names_by_users_are_text_on_the_page_and_never_markup(store: str) -> None:
    run = begin_run(store, "small", 1)
    write_metrics(run, 30)
    write_outcome(
        run,
        metrics={"accuracy": 0.9},
        reason="</p><script>alert(1)</script><img src=x onerror=alert(2)>",
    )
    analyze(run, store)
    page = _page(run)
    assert page.loads == []
    assert "img" not in page.elements
    assert page.text.count("<script>alert(1)</script>") == 2


def test_a_model_without_accuracy_or_a_run_without_rows_has_a_report(store: str) -> None:
    regression = begin_run(store, "small", 1)
    write_metrics(regression, 30, accuracy=False)
    write_outcome(regression, metrics={"loss": 0.3})
    report = analyze(regression, store)
    assert "accuracy" not in report.epochs[0]
    assert report.history[0]["accuracy"] is None
    bare = begin_run(store, "small", 2)
    write_outcome(bare, metrics={"loss": 0.3})
    report = analyze(bare, store)
    assert (report.epochs, report.devices[0]["samples_per_s"]) == ([], None)


def test_a_regression_is_shown_by_its_error_in_history_and_chart(store: str) -> None:
    earlier, run = (begin_run(store, "house", number) for number in (1, 2))
    write_outcome(earlier, metrics={"loss": 0.4, "rmse": 31000.0, "mae": 900.0, "r2": 0.5})
    write_outcome(run, metrics={"loss": 0.3, "rmse": 23249.7, "mae": 812.25, "r2": 0.61})
    report = analyze(run)
    assert [(row["metric"], row["result"]) for row in report.history] == [
        ("rmse", 23249.7),
        ("rmse", 31000.0),
    ]
    page = _page(run)
    for shown in ("rmse 23,250", "rmse 31,000"):
        assert shown in page.text
    assert b"RMSE of this job" in run.objects.get("report/report.html")
    (target,) = history([run], "pandas", "mae")
    assert (target["metric"], target["result"]) == ("mae", 812.25)
    epochs: list[dict[str, float | None]] = [{"epoch": 0, "rmse": 9.0, "mae": 5.0}]
    curves = validation_metrics(epochs)
    assert [one.label.value for one in curves.legend[0].items] == ["RMSE", "MAE"]
    assert validation_metrics([{"epoch": 0, "loss": 5.0}]) is None


def test_an_unfinished_training_is_not_analysed(store: str) -> None:
    run = begin_run(store, "small", 1)
    with pytest.raises(FileNotFoundError):
        analyze(run, store)
    assert list(run.objects.list("report/")) == []
    assert [one.uri for one in list_runs(store, doors.settings())] == [run.uri]


def test_the_report_shows_figures_by_class_and_escapes_their_names(store: str) -> None:
    run = finished_training(store)
    found = ClassMetrics(
        names=["cat", "<b>"],
        rows=[5, 1],
        precision=[0.8125, 0.0],
        recall=[0.75, 0.0],
        f1=[0.78, 0.0],
        confusion=[[4, 1], [1, 0]],
    )
    run.write(run.read(Result).model_copy(update={"by_class": found}))
    analyze(run, store)
    html = run.objects.get("report/report.html").decode()
    assert "<td>cat</td>" in html
    assert ">0.8125</td>" in html
    assert '<tr><th></th><th scope="col">cat</th><th scope="col">&lt;b&gt;</th></tr>' in html
    shown = re.search(r'<table class="confusion">.*?</table>', html)
    assert shown is not None
    assert re.findall(r"<td[^>]*>(\d+)</td>", shown[0]) == ["4", "1", "1", "0"]
    assert "<b></th>" not in html


def test_many_classes_are_shown_by_their_most_frequent_confusions(store: str) -> None:
    run = finished_training(store)
    one = [1.0]
    found = ClassMetrics(
        names=["a"],
        rows=[9],
        precision=one,
        recall=one,
        f1=one,
        confusion=[],
        confused=[Confusion(actual="a", predicted="<i>", rows=7)],
    )
    run.write(run.read(Result).model_copy(update={"by_class": found}))
    analyze(run, store)
    html = run.objects.get("report/report.html").decode()
    assert '<td>a</td><td>&lt;i&gt;</td><td class="figure">7</td>' in html
    assert '<table class="confusion">' not in html


def test_an_early_stop_is_said_and_its_duration_is_not_held_against_the_prediction(
    store: str,
) -> None:
    run = finished_training(store)
    stop = EarlyStop(epochs=2, metric="loss", best=0.2, best_epoch=1, reason="ended < soon")
    run.write(run.read(Result).model_copy(update={"early_stopped": stop}))
    report = analyze(run, store)
    by_name = {row["quantity"]: row for row in report.predicted_and_measured}
    assert (by_name["duration"]["inside"], by_name["duration"]["error"]) == (None, None)
    assert by_name["step time"]["error"] is not None
    assert report.history[0]["duration_error"] is None
    assert "Training ended &lt; soon." in run.objects.get("report/report.html").decode()


def test_the_report_shows_the_runs_outcome_not_its_current_step(store: str) -> None:
    assert analyze(finished_training(store), store).history[0]["state"] == "success"


def test_this_jobs_runs_are_listed_before_those_of_other_jobs(store: str) -> None:
    own = finished_training(store, "mine", 1)
    for number in range(2, 62):
        begin_run(store, "other", number)
    run = finished_training(store, "mine", 99)
    assert analyze(run, store).history[1]["run"] == own.uri
    assert own.id in run.objects.get("report/report.html").decode()


def test_the_number_of_compared_runs_is_that_of_readable_ones(store: str) -> None:
    for number in range(1, 206):
        begin_run(store, "other", number)
    report = analyze(finished_training(store, "mine", 999), store)
    assert report.runs_compared == len(report.history) - 1


def test_devices_missing_from_the_estimate_are_left_out_of_the_comparison(
    store: str,
) -> None:
    run = finished_training(store)
    estimate = run.read(Estimate)
    run.write(estimate.model_copy(update={"curves": estimate.curves[:1]}))
    named = [row["quantity"] for row in analyze(run, store).predicted_and_measured]
    assert "memory of here/cpu-0" in named
    assert "memory of here/cpu-1" not in named


def test_an_earlier_run_of_zero_duration_is_handled(store: str) -> None:
    write_outcome(finished_training(store, "small", 1), metrics={"accuracy": 0.9}, duration_s=0.0)
    assert analyze(finished_training(store, "small", 2), store).runs_compared == 1


def test_a_recommended_model_is_on_the_page_as_text(store: str) -> None:
    run = finished_training(store)
    analyze(run, store)
    assert "Recommended model" not in _page(run).text
    trees = BoostedTrees(library="LightGBM", metric=0.99, rows=24, duration_s=1.0)
    run.write(recommendation().model_copy(update={"reference": trees}))
    analyze(run, store)
    text = _page(run).text
    verdict = "Boosted trees are better: accuracy 0.9900, this model 0.9500"
    assert 0 < text.index(verdict) < text.index("Predicted and measured") < text.index("optimizer")
    assert "Recommended model" in text
    assert "it <is> the simplest" in text
    assert "the data has a & b" in text
    assert "train.epochs 30" in text


def test_a_metric_that_a_model_names_is_text_on_the_page(store: str) -> None:
    run = begin_run(store, "small", 1)
    write_outcome(run, metrics={"<img src=x>": 1.0})
    analyze(run, store)
    assert b"<img src=x>" not in run.objects.get("report/report.html")


def test_large_row_files_are_read_by_a_clusters_processes(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished_training(store)
    threads = analyze(run, store)
    monkeypatch.setattr(step, "LOCAL_CLUSTER_BYTES", 0)
    before = dict(os.environ)
    assert analyze(run, store).devices == threads.devices
    assert dict(os.environ) == before


def test_tasks_on_an_s3_store_can_be_sent_to_a_clusters_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (
        ("ENDPOINT", "http://127.0.0.1:9"),
        ("ACCESS_KEY", "a"),
        ("SECRET_KEY", "b"),
    ):
        monkeypatch.setitem(os.environ, f"TRAINWRIGHT_S3_{name}", value)
    assert cloudpickle.dumps(
        (step._part, "s3://bucket/runs/small/20260101T000001Z-abcdef", "metrics/x.parquet")
    )
