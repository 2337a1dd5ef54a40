"""Trains a model in one process, without a run: for probes and for the benchmark.

The loop is the ordinary one: `adapt`, mini-batches in a new order each epoch, the job's optimizer
and schedule, an evaluation after each epoch of which the best counts. If time is limited, the
schedule follows the clock, so that it always comes to its end.

    python -m trainwright.tasks.recommend.trials.trial < request.json > answer.json
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np  # noqa: TID253 - loaded only to recommend
from pydantic import BaseModel, ConfigDict, Field

from trainwright.estimator.errors import TrainwrightError
from trainwright.estimator.trace import source as model_source
from trainwright.estimator.trace.source import ADAPT_ROWS, ModelDefinition
from trainwright.tasks.data.dataset import Dataset
from trainwright.tasks.recommend.similar_sets.data_figures import metric_of, sampled
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.train_spec import TrainSpec

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]
_MOST_VALIDATED = 20_000
_EVALUATED_AT_ONCE = 4_096
_RATES = {"sgd": 0.05, "momentum": 0.02, "adam": 1e-3, "adamw": 1e-3}
"""learning rates if the job's is `auto`"""


class TrialRequest(BaseModel):
    """A model to train on a sample of a job's training rows."""

    model_config = ConfigDict(frozen=True)
    data: DataSpec = Field(description="on this machine")
    home: str = Field(description="folder of prepared data")
    folder: str = Field(description="of the model's source")
    entry: str
    train: TrainSpec
    rows: int = Field(description="training rows at most")
    limit_s: float


class Trial(BaseModel):
    """What a trial reached."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")
    error: float = Field(
        description="1 - accuracy, RMSE or MAE on validation rows, after the best epoch; infinite "
        "if it diverged"
    )
    epochs: int
    passes: float = Field(description="over the sample, the last one perhaps in part")
    seconds: float


def train(
    definition: ModelDefinition,
    data: Dataset,
    spec: TrainSpec,
    rows: Array,
    limit_s: float = math.inf,
) -> Trial:
    """Train a new model on these rows of the data, for at most this time."""
    import torch

    from trainwright.estimator.trace.batch_loss import loss_function
    from trainwright.tasks.train.rank.optimizer import learning_rate_at, make_optimizer

    torch.manual_seed(spec.seed)
    started = time.perf_counter()
    model = model_source.build(definition, {})
    known = _batch(data, sampled(rows, ADAPT_ROWS))
    model_source.adapt(definition, model, *known, data.names())
    loss = loss_function(definition, data.schema.task, spec.label_smoothing)
    rate = _RATES[spec.optimizer.name] if spec.learning_rate == "auto" else spec.learning_rate
    optimizer = make_optimizer(model.parameters(), spec.optimizer, rate)
    size = 256 if spec.global_batch_size == "auto" else spec.global_batch_size
    size = min(size, len(rows))
    validated = sampled(data.split.validation, _MOST_VALIDATED)
    order = np.random.default_rng(spec.seed)
    best, since, epoch, steps, done = math.inf, 0, 0, 0, 0.0
    while epoch < spec.epochs and done < 1:
        shuffled = order.permutation(rows)
        for begin in range(0, len(rows) - size + 1, size):
            share = (epoch + begin / len(rows)) / spec.epochs
            done = max(share, (time.perf_counter() - started) / limit_s)
            if done >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(done, 1.0, rate, spec.schedule, spec.warm_up)
            inputs, targets = _batch(data, np.sort(shuffled[begin : begin + size]))
            optimizer.zero_grad()
            value = loss(model(inputs), targets)
            value.backward()
            if spec.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), spec.clip_norm)
            optimizer.step()
            steps += 1
        epoch += 1
        error = evaluated(model, data, validated)
        best, since = (error, 0) if error < best else (best, since + 1)
        stopping = spec.early_stopping
        if not math.isfinite(error) or (stopping is not None and since >= stopping.patience):
            break
    return Trial(
        error=best,
        epochs=epoch,
        passes=steps / (len(rows) // size),
        seconds=time.perf_counter() - started,
    )


def evaluated(model: torch.nn.Module, data: Dataset, rows: Array) -> float:
    """The error on these rows: 1 - accuracy, RMSE or MAE; infinite if an output is no number."""
    import torch

    metric = metric_of(data.schema.task)
    total, count = 0.0, 0
    model.eval()
    with torch.no_grad():
        for begin in range(0, len(rows), _EVALUATED_AT_ONCE):
            inputs, targets = _batch(data, rows[begin : begin + _EVALUATED_AT_ONCE])
            outputs = model(inputs)
            if not outputs.isfinite().all():
                return math.inf
            if metric == "accuracy":
                total += float((outputs.argmax(1) != targets).sum())
                count += len(targets)
                continue
            if outputs.ndim > targets.ndim and outputs.shape[-1] > 1:  # quantiles
                outputs = outputs[..., outputs.shape[-1] // 2]
            gap = (outputs.reshape(targets.shape) - targets).double()
            total += float(gap.square().sum() if metric == "rmse" else gap.abs().sum())
            count += gap.numel()
    model.train()
    mean = total / max(1, count)
    found = math.sqrt(mean) if metric == "rmse" else mean
    return found if math.isfinite(found) else math.inf


def _batch(data: Dataset, rows: Array) -> tuple[Any, torch.Tensor]:
    """The rows as a model gets them."""
    import torch

    arrays, targets = data.batch(rows)
    inputs = {name: torch.from_numpy(np.ascontiguousarray(one)) for name, one in arrays.items()}
    return model_source.nested(inputs), torch.from_numpy(np.ascontiguousarray(targets))


def main() -> int:
    """Answer the request on standard input."""
    import torch

    from trainwright.tasks.data.prepared import prepared

    torch.set_num_threads(1)
    request = TrialRequest.model_validate_json(sys.stdin.read())
    try:
        definition = model_source.load(Path(request.folder), request.entry)
        data = prepared(request.data, Path(request.home), request.train.seed)
        rows = sampled(data.split.train, request.rows)
        answer = train(definition, data, request.train, rows, request.limit_s).model_dump_json()
    except TrainwrightError as error:
        answer = json.dumps({"error": error.document()})
    sys.stdout.write(answer)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
