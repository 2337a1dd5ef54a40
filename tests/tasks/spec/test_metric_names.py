"""The metrics that a summary shows."""

from __future__ import annotations

from trainwright.tasks.spec.metric_names import shown_metrics


def test_losses_come_last_and_a_log_loss_that_is_the_loss_is_left_out() -> None:
    metrics = {"loss": 0.25, "accuracy": 0.9, "log_loss": 0.25, "auc": 1.0, "train_loss": 0.1}
    assert list(shown_metrics(metrics).items()) == [
        ("accuracy", 0.9),
        ("auc", 1.0),
        ("loss", 0.25),
        ("train loss", 0.1),
    ]
    assert "log loss" in shown_metrics(metrics | {"loss": 0.5})  # label smoothing changes the loss
