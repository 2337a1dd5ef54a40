"""`PromoteOperator` and `ApprovePromotionOperator`: point an alias at a better model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import Context

from trainwright.operators.assets import alias_asset, announce
from trainwright.operators.base import StepOperator, given
from trainwright.operators.failures import airflow_errors
from trainwright.operators.hooks import connection_ids, settings_of
from trainwright.operators.links import service_address


class PromoteOperator(StepOperator):
    """Point the job's alias (`promotion.alias`) at the run's model if it is the better one.

    Models are compared by `promotion.only_if_better`, else by the metric of `train.target`; if
    the job has neither, every model counts as better. A job without `promotion` changes nothing
    and succeeds. The alias is changed by compare-and-swap: if two runs promote at once, the
    better model stays. With the outlet `trainwright.operators.assets.PROMOTED` or
    `alias_asset(job, alias)`, a change is an event with the metrics in its extra.

    | input | default | meaning |
    |---|---|---|
    | `run` *(templated)* | required | the reference that `store` returned, or a run's URI |
    | `alias` *(templated)* | the job's | another alias than the job's |
    | `name` *(templated)* | the job's | the alias's owner; several jobs may compete for one alias |
    | `approved` *(templated)* | False | result of `ApprovePromotionOperator`, or True |
    | those of `StepOperator` | | |

    `approved` is required if the job requires approval.

    Returns `{"run", "artefact", "promoted", "alias", "reason", "metric", "value", "current",
    "current_value"}`.

    | failure | what Airflow does |
    |---|---|
    | not sealed, or changed since; unknown metric; not approved | fails without a retry |
    | unreachable store | retries |
    """

    step = "promote"
    template_fields: Sequence[str] = (*StepOperator.template_fields, "alias", "name", "approved")

    def __init__(
        self,
        *,
        alias: str | None = None,
        name: str | None = None,
        approved: dict[str, Any] | bool | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.alias = alias
        self.name = name
        self.approved = approved

    def work(self, context: Context) -> dict[str, Any]:
        """Compare, and change the alias."""
        from trainwright.tasks.promote import model_metrics, promote

        run = self.open(context).run
        name = given(self.name)
        reference = promote(run, name, given(self.alias), approved=_says_yes(self.approved))
        if reference["promoted"] and reference["current"] != run.uri:
            extra = {
                "run": run.uri,
                "metrics": model_metrics(run),
                "previous": reference["current"],
            }
            announce(
                context, self.outlets, alias_asset(name or run.job_name, reference["alias"]), extra
            )
        moved = "promoted" if reference["promoted"] else "not promoted"
        to = f" to {reference['alias']}" if reference["alias"] else ""
        self.log.info("%s%s: %s", moved, to, reference["reason"])
        return reference


def _says_yes(answer: dict[str, Any] | bool | str | None) -> bool:
    """Whether promotion was approved: by the approving task's result, or by the DAG's author."""
    if isinstance(answer, dict):
        return list(answer.get("chosen_options") or []) == [ApprovalOperator.APPROVE]
    return str(answer).lower() == "true"


class ApprovePromotionOperator(ApprovalOperator):
    """Ask a person if the job has `promotion.require_approval` and the model is better.

    The question has both models' metrics, the verdict on the job's target, and links to the run
    and its report. Otherwise it continues at once. Waits without a worker slot, up to
    `response_timeout`. "Reject" skips the tasks that follow.

    | input | default | meaning |
    |---|---|---|
    | `run` *(templated)* | required | the reference that `store` returned, or a run's URI |
    | `alias`, `name` *(templated)* | the job's | as in `PromoteOperator` |
    | `store_conn_id`, `ledger_conn_id` *(templated)* | [trainwright] | as in `StepOperator` |
    | `unattended` | False | skip instead of asking; for a DAG run that no UI shows |
    | those of `ApprovalOperator` | | `response_timeout`, `defaults`, `assigned_users` … |

    Returns `{"asked", "reason"}`, or the person's choice.

    | failure | what Airflow does |
    |---|---|
    | run without a model, unknown metric | fails without a retry |
    | unreachable store | retries |
    """

    template_fields: Sequence[str] = (
        *ApprovalOperator.template_fields,
        "run",
        "alias",
        "name",
        "store_conn_id",
        "ledger_conn_id",
    )

    def __init__(
        self,
        *,
        run: dict[str, Any] | str,
        alias: str | None = None,
        name: str | None = None,
        unattended: bool = False,
        store_conn_id: str | None = None,
        ledger_conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"subject": "Promote this model?", **kwargs})
        self.unattended = unattended
        self.run, self.alias, self.name = run, alias, name
        self.store_conn_id, self.ledger_conn_id = store_conn_id, ledger_conn_id

    def execute(self, context: Context) -> Any:
        """Ask, or continue without asking."""
        from airflow.sdk.exceptions import AirflowSkipException

        from trainwright.tasks.approval_text import approval_text
        from trainwright.tasks.promote import decide
        from trainwright.tasks.runs.run import Run

        with airflow_errors():
            ids = connection_ids(
                {
                    "store_conn_id": given(self.store_conn_id),
                    "ledger_conn_id": given(self.ledger_conn_id),
                }
            )
            uri = self.run.get("run") if isinstance(self.run, dict) else self.run
            run = Run(str(uri), settings_of(ids))
            needed = run.job().needs_approval
            decision = decide(run, given(self.name), given(self.alias))[0]
            text = approval_text(run, decision, given(self.name), service_address)
        if not needed or not decision.promoted or decision.current == run.uri:
            return {"asked": False, "reason": decision.reason}
        self.subject = f"Promote {run.job_name} {run.id} to {decision.alias}?"
        self.body = text
        if self.unattended:
            raise AirflowSkipException(
                f"{decision.alias}: needs a person's approval, which is given in Airflow's UI"
            )
        return super().execute(context)
