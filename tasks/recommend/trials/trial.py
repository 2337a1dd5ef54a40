"""Trains a model in one process, without a run: for comparisons and for the benchmark.

The loop is the ordinary one: `adapt`, mini-batches in a new order each epoch, the job's optimizer
and schedule, an evaluation after each epoch of which the best counts. The schedule always comes to
its end: with a part of the recipe's passes it is shorter, and if time is limited, it follows the
clock as soon as that is ahead.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np  # noqa: TID253 - loaded only to recommend
from pydantic import BaseModel, ConfigDict, Field

from trainwright.estimator.trace import source as model_source
from trainwright.estimator.trace.source import ADAPT_ROWS, ModelDefinition
from trainwright.tasks.data.dataset import Dataset
from trainwright.tasks.recommend.similar_sets.data_figures import metric_of, sampled
from trainwright.tasks.spec.train_spec import TrainSpec

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]
_MOST_VALIDATED = 20_000
_EVALUATED_AT_ONCE = 4_096
_RATES = {"sgd": 0.05, "momentum": 0.02, "adam": 1e-3, "adamw": 1e-3}
"""learning rates if the job's is `auto`"""


class Trial(BaseModel):
    """What a trial reached."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")
    error: float = Field(
        description="1 - accuracy, RMSE or MAE on validation rows, after the best epoch; infinite "
        "if it diverged"
    )
    losses: list[float] = Field(
        default_factory=list,
        description="of the validation rows then: 1 for a wrong class, the squared error, or the "
        "absolute one",
    )
    epochs: int
    steps: int = 0
    passes: float = Field(description="over the training rows, the last one perhaps in part")
    seconds: float
    clocked: bool = Field(default=False, description="whether the time ended it")


def train(
    definition: ModelDefinition,
    data: Dataset,
    spec: TrainSpec,
    rows: Array,
    limit_s: float = math.inf,
    passes: float | None = None,
) -> Trial:
    """Train a new model on these rows of the data, for at most this time.

    `passes`: over the rows; default: as many as the recipe has epochs.
    """
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
    size = batch_of(spec, len(rows))
    last = max(1, round((spec.epochs if passes is None else passes) * (len(rows) // size)))
    validated = sampled(data.split.validation, _MOST_VALIDATED)
    order = np.random.default_rng(spec.seed)
    best, losses, since, epoch, steps, done = math.inf, np.zeros(0), 0, 0, 0, 0.0
    while done < 1:
        shuffled = order.permutation(rows)
        for begin in range(0, len(rows) - size + 1, size):
            done = max(steps / last, (time.perf_counter() - started) / limit_s)
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
        done = max(done, steps / last)
        epoch += 1
        error, of_rows = evaluated(model, data, validated)
        if error < best:
            best, losses, since = error, of_rows, 0
        else:
            since += 1
        stopping = spec.early_stopping
        if not math.isfinite(error) or (stopping is not None and since >= stopping.patience):
            break
    return Trial(
        error=best,
        losses=losses.tolist(),
        epochs=epoch,
        steps=steps,
        passes=steps / (len(rows) // size),
        seconds=time.perf_counter() - started,
        clocked=done >= 1 and steps < last,
    )


def batch_of(spec: TrainSpec, rows: int) -> int:
    """Rows of a mini-batch."""
    size = 256 if spec.global_batch_size == "auto" else spec.global_batch_size
    return min(size, rows)


def evaluated(model: torch.nn.Module, data: Dataset, rows: Array) -> tuple[float, Array]:
    """The error on these rows, 1 - accuracy, RMSE or MAE, and the loss of each as in `Trial`.

    The error is infinite if an output is no number.
    """
    import torch

    metric = metric_of(data.schema.task)
    parts = [np.zeros(0)]
    model.eval()
    with torch.no_grad():
        for begin in range(0, len(rows), _EVALUATED_AT_ONCE):
            inputs, targets = _batch(data, rows[begin : begin + _EVALUATED_AT_ONCE])
            outputs = model(inputs)
            if not outputs.isfinite().all():
                return math.inf, parts[0]
            if metric == "accuracy":
                parts.append((outputs.argmax(1) != targets).double().numpy())
                continue
            if outputs.ndim > targets.ndim and outputs.shape[-1] > 1:  # quantiles
                outputs = outputs[..., outputs.shape[-1] // 2]
            gap = (outputs.reshape(targets.shape) - targets).double().reshape(len(targets), -1)
            parts.append((gap.square() if metric == "rmse" else gap.abs()).mean(1).numpy())
    model.train()
    losses = np.concatenate(parts)
    mean = float(losses.mean()) if len(losses) else 0.0
    error = math.sqrt(mean) if metric == "rmse" else mean
    return (error if math.isfinite(error) else math.inf), losses


def _batch(data: Dataset, rows: Array) -> tuple[Any, torch.Tensor]:
    """The rows as a model gets them."""
    import torch

    arrays, targets = data.batch(rows)
    inputs = {name: torch.from_numpy(np.ascontiguousarray(one)) for name, one in arrays.items()}
    return model_source.nested(inputs), torch.from_numpy(np.ascontiguousarray(targets))
