"""`TrainOperator`: train on the leased devices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import Context, ResumableJobMixin

from trainwright.operators.base import StepOperator
from trainwright.operators.failures import airflow_errors, airflows_words

if TYPE_CHECKING:
    from trainwright.tasks.context import RunContext

LOOK_EVERY_S = 2.0


class TrainOperator(ResumableJobMixin, StepOperator):
    """Train on the leased devices: one rank each, with its own batch and CPU share.

    Training runs in a separate process; a run has at most one. The task is deferred meanwhile, so
    it occupies no worker slot while devices train or while it waits for them. The ranks' logs
    appear in the task's log, live if the triggerer is on the same machine. A retry attaches to
    the process, or starts one that resumes from the newest checkpoint. Killing the task (also in
    the UI) saves a checkpoint, stops the ranks and frees the devices. The triggerer does that; if
    none is alive at that moment, `ReleaseOperator` does it as teardown. A DAG without either
    trains to the end.

    | input | default | meaning |
    |---|---|---|
    | those of `StepOperator` | | |
    | `deferrable` | True | False: keep the worker slot, if workers end with their task |
    | `durable` | True | keep the run in Airflow's task state, so that a retry finds it |

    Returns `{"run", "artefact", "state", "metrics", "model_of", "devices", "target_reached",
    "duration_s"}`; `model_of` says of which epoch or step the model and its metrics are.

    | failure | what Airflow does |
    |---|---|
    | bad input, a model or loss that fails, infeasible plan | fails without a retry |
    | training process lost, `queue_timeout` over, unreachable service | retries |
    """

    step = "train"
    external_id_key = "trainwright_run"
    template_fields: Sequence[str] = StepOperator.template_fields

    def __init__(self, *, deferrable: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.deferrable = deferrable

    def work(self, context: Context) -> dict[str, Any]:
        """Start the training process or attach to it, and wait for it."""
        found: dict[str, Any] = self.execute_resumable(context)
        return found

    def resume(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Continue after the process has ended."""
        with airflow_errors():
            self._waited = str(event["run"])
            return self._result(self.open(context))

    def submit_job(self, context: Context) -> str:
        """Start the process unless one runs. Returns the run's URI."""
        from trainwright.tasks.runs.artefacts.training_result import Result
        from trainwright.tasks.train.launcher import background

        found = self.open(context)
        if not found.run.has(Result):
            background.start(found)
        return found.run.uri

    def get_job_status(self, external_id: Any, context: Context) -> str:
        """`running`, `success` or `failed`; a failed training resumes from a checkpoint."""
        from trainwright.tasks.runs.artefacts.training_result import Result
        from trainwright.tasks.runs.run import Run
        from trainwright.tasks.train.launcher import background

        run = Run(str(external_id), self.settings())
        if background.launcher(run) is not None:
            return "running"
        return "success" if run.has(Result) else "failed"

    def is_job_active(self, status: str) -> bool:
        """Whether there is a process to attach to."""
        return status == "running"

    def is_job_succeeded(self, status: str) -> bool:
        """Whether training is done."""
        return status == "success"

    def poll_until_complete(self, external_id: Any, context: Context) -> dict[str, Any]:
        """Wait for the process, deferred or in the worker. Returns the reference.

        If a retry attaches to the process, Airflow takes this return value as the task's result.
        """
        from trainwright.operators.triggers import TrainingTrigger
        from trainwright.tasks.train.launcher import background

        self._waited = str(external_id)
        found = self.open(context)
        run = found.run
        if self.deferrable and background.launcher(run):
            trigger = TrainingTrigger(run.uri, found.holder.name, connections=self.connections())
            self.defer(trigger=trigger, method_name="resume")
        logs = background.Logs(run)
        while background.launcher(run):
            self._relay(logs)
            time.sleep(LOOK_EVERY_S)
        self._relay(logs)
        return self._result(found)

    def get_job_result(self, external_id: Any, context: Context) -> dict[str, Any]:
        """The reference. Raises the error that ended training."""
        self._waited = str(external_id)
        return self._result(self.open(context))

    def _result(self, found: RunContext) -> dict[str, Any]:
        from trainwright.tasks.train.launcher import background

        try:
            background.raise_failure(found.run)
            reference = self._reference_of(found)
        except BaseException:
            self._free(found)
            raise
        if not self.reference():
            found.run.note(state="success", step=None)  # no process works on the run now
            self._free(found)
        return reference

    def _reference_of(self, found: RunContext) -> dict[str, Any]:
        """The step's reference. The step is recorded again only if its process has not done so."""
        from trainwright.tasks import chain

        status = found.run.status()
        recorded = status.step is None and self.step in status.steps
        if not recorded or status.holder != found.holder.name:
            return chain.do(found, self.step)
        chain.keep_hold(found)  # for the next task
        return {"run": found.run.uri, **chain.step(self.step).do(found)}

    def on_kill(self) -> None:
        """Stop the ranks with a checkpoint, and free the devices."""
        from trainwright.tasks.train.launcher import background

        super().on_kill()
        if self._found is not None:
            background.stop(self._found)

    def _relay(self, logs: Any) -> None:
        for line in logs.fresh():
            self.log.info("%s", airflows_words(line))

    def _free(self, found: RunContext) -> None:
        found.ledger.release(found.run.uri, holder=found.holder.name)
