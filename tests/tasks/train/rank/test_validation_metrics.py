"""Metrics from sums equal scikit-learn's on the whole, however the rows are split."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference
from training_case import request

from trainwright.tasks.data import dataset
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.spec.metric_names import MOST_IN_MATRIX, better_is, metrics_of
from trainwright.tasks.train import TrainRequest, train
from trainwright.tasks.train.rank.validation_metrics import (
    ClassSums,
    MetricSums,
    QuantitySums,
    ValidationMetrics,
    naive_error,
    sums_of,
)

CPU = torch.device("cpu")
seeds = st.integers(0, 2**32 - 1)


def merged(parts: list[MetricSums]) -> MetricSums:
    whole = parts[0]
    for one in parts[1:]:
        whole.vector = whole.vector + one.vector
    return whole


def pieces(rows: int, cuts: list[int]) -> list[slice]:
    places = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    return [slice(a, b) for a, b in pairwise(places)]


def classified(
    logits: torch.Tensor, targets: torch.Tensor, classes: int, cuts: list[int]
) -> ValidationMetrics:
    parts: list[MetricSums] = []
    for piece in pieces(len(targets), cuts):
        parts.append(ClassSums(classes))
        parts[-1].add(logits[piece], targets[piece])
    return merged(parts).found(len(targets))


def drawn(seed: int, rows: int, classes: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that know something of the targets, of which some classes may be missing."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (rows,), generator=generator)
    logits = torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    logits[torch.arange(rows), targets] += 0.7
    return logits * spread, targets


cases = st.tuples(
    seeds, st.integers(1, 60), st.integers(2, 7), st.sampled_from([0.0, 0.01, 1.0, 30.0])
)


@settings(deadline=None)
@given(cases)
def test_metrics_of_classes_are_those_of_scikit_learn(case: tuple[int, int, int, float]) -> None:
    classes = case[2]
    logits, targets = drawn(*case)
    found = classified(logits, targets, classes, [])
    guess, names = logits.argmax(1), list(range(classes))
    assert found.metrics["accuracy"] == reference.accuracy_score(targets, guess)
    assert found.metrics["f1"] == pytest.approx(
        reference.f1_score(targets, guess, average="macro", zero_division=0)
    )
    probabilities = torch.softmax(logits, 1).numpy()
    if case[3] < 30:  # scikit-learn bounds probabilities, which changes losses of certain errors
        assert found.metrics["log_loss"] == pytest.approx(
            reference.log_loss(targets, probabilities, labels=names)
        )
    table = reference.confusion_matrix(targets, guess, labels=names)
    assert found.by_class["confusion"] == table.tolist()
    precision, recall, f1, rows = reference.precision_recall_fscore_support(
        targets, guess, labels=names, zero_division=0
    )
    assert found.by_class["rows"] == rows.tolist()
    for name, wanted in (("precision", precision), ("recall", recall), ("f1", f1)):
        assert found.by_class[name] == pytest.approx(wanted.tolist())


@settings(deadline=None)
@given(cases)
def test_auc_is_that_of_scikit_learn_within_its_stated_error(
    case: tuple[int, int, int, float],
) -> None:
    classes = case[2]
    logits, targets = drawn(*case)
    found = classified(logits, targets, classes, [])
    probabilities = torch.softmax(logits, 1).numpy()
    wanted = [
        reference.roc_auc_score((targets == one).numpy(), probabilities[:, one])
        for one in ([1] if classes == 2 else range(classes))
        if 0 < int((targets == one).sum()) < len(targets)
    ]
    assert ("auc" in found.metrics) == bool(wanted)
    if wanted:
        error = found.by_class["auc_error"]
        assert abs(found.metrics["auc"] - np.mean(wanted)) <= error + 1e-12


def test_auc_of_many_rows_has_a_small_error() -> None:
    logits, targets = drawn(1, 20_000, 10, 2.0)
    found = classified(logits, targets, 10, [])
    wanted = reference.roc_auc_score(targets, torch.softmax(logits, 1).numpy(), multi_class="ovr")
    assert found.by_class["auc_error"] < 5e-4
    assert found.metrics["auc"] == pytest.approx(wanted, abs=1e-5)


@settings(deadline=None)
@given(cases, st.lists(st.integers(0, 60), max_size=4))
def test_sums_of_shards_give_the_metrics_of_the_whole(
    case: tuple[int, int, int, float], cuts: list[int]
) -> None:
    logits, targets = drawn(*case)
    whole = classified(logits, targets, case[2], [])
    parts = classified(logits, targets, case[2], cuts)
    assert parts.by_class == whole.by_class
    assert parts.metrics.pop("log_loss") == pytest.approx(whole.metrics.pop("log_loss"), rel=1e-12)
    assert parts.metrics == whole.metrics


@settings(deadline=None)
@given(
    seeds,
    st.integers(2, 60),
    st.integers(1, 3),
    st.lists(st.integers(0, 60), max_size=4),
    st.sampled_from([0.0, 1e6]),
)
def test_metrics_of_quantities_are_those_of_scikit_learn(
    seed: int, rows: int, width: int, cuts: list[int], offset: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randn(rows, width, generator=generator, dtype=torch.float64) + offset
    outputs = targets + torch.randn(rows, width, generator=generator, dtype=torch.float64)
    parts: list[MetricSums] = []
    for piece in pieces(rows, cuts):
        parts.append(QuantitySums(float(targets[0, 0])))
        parts[-1].add(outputs[piece], targets[piece])
    found = merged(parts).found(rows).metrics
    wanted, given = targets.reshape(-1), outputs.reshape(-1)
    assert found == pytest.approx(
        {
            "rmse": reference.root_mean_squared_error(wanted, given),
            "mae": reference.mean_absolute_error(wanted, given),
            "r2": reference.r2_score(wanted, given),
        },
        rel=1e-7,
        abs=1e-9,
    )


@pytest.mark.parametrize(("off", "r2"), [(0.0, 1.0), (1.0, 0.0)])
def test_r2_of_constant_targets_is_one_without_error_else_zero(off: float, r2: float) -> None:
    sums = QuantitySums(5.0)
    sums.add(torch.full((4,), 1e6 + off), torch.full((4,), 1e6))
    assert sums.found(4).metrics["r2"] == r2


def test_outputs_without_metrics_have_none() -> None:
    logits, targets = drawn(1, 8, 3, 1.0)
    for wrong in ({"logits": logits}, logits[:, :1], logits[:, None, :], targets):
        sums: MetricSums = ClassSums(3)
        sums.add(wrong, targets)
        assert sums.found(8) == ValidationMetrics()
    sums = QuantitySums(0.0)
    sums.add(torch.zeros(8, 3), torch.zeros(8))
    assert sums.found(8) == ValidationMetrics()
    assert sums_of("custom", 0, 0.0, CPU) is None
    assert metrics_of("custom") == ("loss",)


def test_more_outputs_than_classes_count_as_wrong() -> None:
    logits = torch.eye(4, dtype=torch.float64)[[0, 3, 1]] * 5
    found = classified(logits, torch.tensor([0, 0, 1]), 2, [])
    assert found.by_class["confusion"] == [[1, 0], [0, 1]]
    assert found.by_class["recall"] == [0.5, 1.0]
    assert found.metrics["accuracy"] == pytest.approx(2 / 3)


def test_over_a_hundred_classes_have_no_auc_and_no_table() -> None:
    logits, targets = drawn(3, 900, 150, 3.0)
    found = classified(logits, targets, 150, [100, 700])
    assert found.by_class == {}
    assert set(found.metrics) == set(metrics_of("text-classification", 150)) - {"loss"}
    wanted = reference.f1_score(targets, logits.argmax(1), average="macro", zero_division=0)
    assert found.metrics["f1"] == pytest.approx(wanted)


@settings(deadline=None)
@given(seeds, st.integers(2, 40))
def test_the_most_frequent_confusions_are_those_of_the_matrix(seed: int, classes: int) -> None:
    logits, targets = drawn(seed, 500, classes, 1.0)
    found = classified(logits, targets, classes, [250]).by_class
    table = reference.confusion_matrix(targets, logits.argmax(1), labels=range(classes))
    assert found["confusion"] == (table.tolist() if classes <= MOST_IN_MATRIX else [])
    counts = [rows for _, _, rows in found["confused"]]
    off = table - np.diag(np.diag(table))
    assert counts == [one for one in sorted(off.flatten().tolist(), reverse=True) if one][:20]
    assert all(off[own, other] == rows for own, other, rows in found["confused"])


def test_thirty_one_classes_have_pairs_instead_of_a_matrix_in_the_result(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(620, 1, 2, 2)).astype(np.float32)
    np.savez(tmp_path / "many.npz", x=values, label=np.arange(620) % 31)
    result = train(of_arrays(tmp_path, tmp_path / "many.npz", "image-classification", 31))
    assert result.by_class is not None
    assert result.by_class.confusion == []
    assert len(result.by_class.rows) == 31
    wrong = round((1 - result.metrics["accuracy"]) * sum(result.by_class.rows))
    counts = [one.rows for one in result.by_class.confused]
    assert 0 < sum(counts) <= wrong
    assert counts == sorted(counts, reverse=True)
    assert all(one.actual != one.predicted for one in result.by_class.confused)
    assert {one.actual for one in result.by_class.confused} <= set(result.by_class.names)


HISTORY_NET = """
import torch


class Net(torch.nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.out = torch.nn.Linear(1 if outputs > 9 else 5, outputs)

    def forward(self, inputs):
        values = inputs["history"] if isinstance(inputs, dict) else inputs[:, 0, 0, :1]
        return self.out(values)


def build_model(outputs):
    return Net(outputs)
"""


def of_arrays(folder: Path, path: Path, task: str, outputs: int) -> TrainRequest:
    """A training on the arrays in a file."""
    asked = request(folder, [60, 30], backend="torch", model={"outputs": outputs})
    (folder / "source" / "net.py").write_text(HISTORY_NET)
    data = asked.job.data.model_copy(update={"uri": str(path), "task": task})
    job = asked.job.model_copy(update={"data": data})
    return asked.model_copy(update={"job": job, "schema_": dataset.describe(data)})


def test_mase_is_the_error_relative_to_that_of_the_naive_forecast(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    series = np.cumsum(generator.normal(size=400)).astype(np.float32) + 5
    windows = np.lib.stride_tricks.sliding_window_view(series, 8)
    arrays = {"history": windows[:, :5], "other": windows[:, :1], "label": windows[:, 5:]}
    np.savez(tmp_path / "series.npz", **arrays)
    asked = of_arrays(tmp_path, tmp_path / "series.npz", "forecasting", 3)
    result = train(asked)
    rows = dataset.load(asked.job.data).split.train
    scale = np.abs(windows[rows, 5].astype(np.float64) - windows[rows, 4]).mean()
    assert result.metrics["mase"] == pytest.approx(result.metrics["mae"] / scale, rel=1e-9)
    assert set(result.metrics) == {"train_loss", *metrics_of("forecasting")}
    assert better_is("mase") == "less"


def test_a_constant_history_has_no_mase() -> None:
    constant = torch.ones(4, 1)
    sums = QuantitySums(0.0, naive=naive_error(constant[:, 0], constant[:, 0]))
    sums.add(torch.zeros(4, 1), constant)
    assert "mase" not in sums.found(4).metrics


def test_a_training_has_the_metrics_of_its_task(tmp_path: Path) -> None:
    """By the target's metric, the best checkpoint; by class, in result.json."""
    target = {"metric": "auc", "value": 0.5}
    asked = request(tmp_path, [40, 20], epochs=2, backend="torch", target=target)
    result = train(asked)
    assert set(result.metrics) == {"train_loss", *metrics_of("image-classification", 10)}
    assert result.metrics["log_loss"] == pytest.approx(result.metrics["loss"], rel=1e-5)
    assert result.target_reached
    assert result.by_class is not None
    assert result.by_class.names == [str(number) for number in range(10)]
    hits = sum(row[place] for place, row in enumerate(result.by_class.confusion))
    assert hits / sum(result.by_class.rows) == result.metrics["accuracy"]
    assert Result.model_validate(json.loads(result.model_dump_json())) == result
