"""The metrics that a summary shows, and the one that stands for a model."""

from __future__ import annotations

from trainwright.tasks.spec.metric_names import leading_metric, shown_metrics


def test_losses_come_last_and_a_log_loss_that_is_the_loss_is_left_out() -> None:
    metrics = {"loss": 0.25, "accuracy": 0.9, "log_loss": 0.25, "auc": 1.0, "train_loss": 0.1}
    assert list(shown_metrics(metrics).items()) == [
        ("accuracy", 0.9),
        ("auc", 1.0),
        ("loss", 0.25),
        ("train loss", 0.1),
    ]
    assert "log loss" in shown_metrics(metrics | {"loss": 0.5})  # label smoothing changes the loss


def test_the_targets_metric_leads_then_what_people_ask_for_then_a_loss() -> None:
    regression = {"loss": 0.3, "r2": 0.6, "mae": 1.0, "rmse": 2.0}
    assert leading_metric(regression) == "rmse"
    assert leading_metric(regression, "r2") == "r2"
    assert leading_metric(regression, "accuracy") == "rmse"
    assert leading_metric({"loss": 0.3, "train_loss": 0.2, "hit_rate": 0.5}) == "hit_rate"
    assert leading_metric({"train_loss": 0.2, "loss": 0.3}) == "loss"
    assert leading_metric({}) is None
