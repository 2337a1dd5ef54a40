"""Let an alias name the new model, where it is better, and where a person agrees if one must."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import Context

from trainwright.operators.assets import alias_asset, announce
from trainwright.operators.base import StepOperator, airflow_errors, given
from trainwright.operators.hooks import connection_ids, settings_of


class PromoteOperator(StepOperator):
    """Let the job's alias (`promotion.alias`) name the run's model, where it is better than the one it names.

    Better by `promotion.only_if_better`, else by the metric of `train.target`; where the job names neither, every model is. A
    job without `promotion` is left as it is, which is a success. Changed by compare-and-swap: of two at once, the better stays.
    With outlets `trainwright.operators.assets.PROMOTED` or `alias_asset(job, alias)` a change is an event, metrics its extra.

    | input | default | meaning |
    |---|---|---|
    | `run` *(templated)* | needed | the reference that `store` returned, or a run's URI |
    | `alias` *(templated)* | the job's | another alias than the job's `promotion` names |
    | `name` *(templated)* | the job's | whose alias it is: several jobs may compete for one |
    | `approved` *(templated)* | False | what `ApprovePromotionOperator` returned, or True; needed where the job asks for it |
    | those of `StepOperator` | | |

    Returns `{"run", "artefact", "promoted", "alias", "reason", "metric", "value", "current", "current_value"}`.

    | failure | what Airflow does |
    |---|---|
    | run not sealed, or changed since; metric unknown; not approved | fails at once, no retry |
    | the store out of reach | fails; retried as `retries` say |
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
        return reference


def _says_yes(answer: dict[str, Any] | bool | str | None) -> bool:
    """Whether a person agreed: by what the approving task returned, or as the DAG's author says."""
    if isinstance(answer, dict):
        return list(answer.get("chosen_options") or []) == [ApprovalOperator.APPROVE]
    return str(answer).lower() == "true"


class ApprovePromotionOperator(ApprovalOperator):
    """Ask a person, where the job's `promotion.require_approval` says so and the model is better; else go on at once.

    Waits without a worker's slot, for as long as `response_timeout` says; "Reject" skips what comes after.

    | input | default | meaning |
    |---|---|---|
    | `run` *(templated)* | needed | the reference that `store` returned, or a run's URI |
    | `alias`, `name` *(templated)* | the job's | as in `PromoteOperator` |
    | `store_conn_id`, `ledger_conn_id` *(templated)* | [trainwright] | as in `StepOperator` |
    | `unattended` | False | skip instead of asking: for a DAG run that no UI shows |
    | those of `ApprovalOperator` | | `response_timeout`, `defaults`, `notifiers`, `assigned_users` … |

    Returns `{"asked", "reason"}`, or what the person chose.

    | failure | what Airflow does |
    |---|---|
    | run without a model, metric unknown | fails at once, no retry |
    | the store out of reach | fails; retried as `retries` say |
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
        """Ask, or go on."""
        from airflow.sdk.exceptions import AirflowSkipException

        from trainwright.tasks.promote import decide
        from trainwright.tasks.runs.run import Run

        with airflow_errors():
            ids = connection_ids(given(self.store_conn_id), given(self.ledger_conn_id))
            uri = self.run.get("run") if isinstance(self.run, dict) else self.run
            run = Run(str(uri), settings_of(ids))
            needed = run.job().needs_approval
            decision = decide(run, given(self.name), given(self.alias))[0]
        if not needed or not decision.promoted or decision.current == run.uri:
            return {"asked": False, "reason": decision.reason}
        if self.unattended:
            raise AirflowSkipException(
                f"{decision.alias}: needs a person's approval, which is given in Airflow's UI"
            )
        self.subject = f"Promote {run.job_name} {run.id} to {decision.alias}?"
        self.body = (
            f"{decision.reason}.\n\n- run: `{run.uri}`\n- now: `{decision.current or 'none'}`"
        )
        return super().execute(context)
