"""Which validation metric decides about a training, and when it ends before its last epoch.

Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.tasks.runs.artefacts.training_result import EarlyStop
from trainwright.tasks.spec.metric_names import better_is
from trainwright.tasks.spec.train_spec import TrainSpec
from trainwright.tasks.train.checkpoint.files import CheckpointState


def deciding_metric(spec: TrainSpec, found: Mapping[str, float]) -> str:
    """The metric that chooses the best checkpoint and ends a training early.

    It is early_stopping's, else the target's, else the accuracy; the loss if that was not found.
    """
    stopping, target = spec.early_stopping, spec.target
    named = (stopping and stopping.metric) or (target and target.metric) or "accuracy"
    return named if named in found else "loss"


def score_of(metric: str, found: Mapping[str, float]) -> float:
    """The metric's value with the sign that makes a greater score better."""
    return found[metric] if better_is(metric) == "greater" else -found[metric]


def better_tie(score: float, found: Mapping[str, float], state: CheckpointState) -> bool:
    """Whether validation equals the best so far by the deciding metric, and has a lower loss."""
    loss, best_loss = found.get("loss"), state.best_loss
    return (
        score == state.best_score
        and loss is not None
        and best_loss is not None
        and loss < best_loss
    )


def early_stop(
    spec: TrainSpec,
    found: Mapping[str, float],
    *,
    epochs: int,
    since_best: int,
    best_score: float | None,
) -> EarlyStop:
    """Why a training ended after `epochs` epochs.

    The metric did not improve in the last `since_best` of them. `found`: the last one's metrics.
    """
    metric = deciding_metric(spec, found)
    best = best_score if best_score is None or better_is(metric) == "greater" else -best_score
    value = "none was finite" if best is None else f"{best:.6g} after epoch {epochs - since_best}"
    reason = (
        f"ended after epoch {epochs} of {spec.epochs}: {metric} has not improved for {since_best} "
        f"evaluation{'s' if since_best > 1 else ''} (best: {value}); the learning rate's schedule "
        f"and the predicted duration are those of all {spec.epochs} epochs"
    )
    return EarlyStop(
        epochs=epochs,
        metric=metric,
        best=best,
        best_epoch=epochs - since_best,
        reason=reason,
    )
