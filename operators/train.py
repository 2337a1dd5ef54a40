"""Train on the leased devices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import Context, ResumableJobMixin

from trainwright.operators.base import StepOperator, airflow_errors

if TYPE_CHECKING:
    from trainwright.tasks.context import RunContext

LOOK_EVERY_S = 2.0


class TrainOperator(ResumableJobMixin, StepOperator):
    """Train on the leased, unlike devices: one rank each, with its own batch and share of the CPU; gradients weighted.

    Training runs in a process of its own, of which there is one at most for a run. The task is deferred meanwhile: it holds no
    worker's slot while devices train or while it waits for them; the log of every rank comes into the task's log, live where
    the triggerer is on the same machine. A task that is tried again attaches to the process, or starts one that goes on from
    the newest checkpoint. Killing the task, by the UI too, saves a checkpoint, stops the ranks and frees the devices. That is the
    triggerer's work; where none lives at that moment, it is `ReleaseOperator`'s, as teardown: a DAG without it trains to the end.

    | input | default | meaning |
    |---|---|---|
    | those of `StepOperator` | | |
    | `deferrable` | True | False: keep the worker's slot, for executors whose workers end with the task (Kubernetes) |
    | `durable` | True | remember the run in Airflow's task state, so that a retry finds it (`ResumableJobMixin`) |

    Returns `{"run", "artefact", "state", "metrics", "devices", "target_reached"}`.

    | failure | what Airflow does |
    |---|---|
    | bad input, a model or loss that fails, infeasible plan | fails at once, no retry |
    | the process was lost, devices not had in `queue_timeout`, a service out of reach | fails; retried as `retries` say |
    """

    step = "train"
    external_id_key = "trainwright_run"
    template_fields: Sequence[str] = StepOperator.template_fields

    def __init__(self, *, deferrable: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.deferrable = deferrable

    def work(self, context: Context) -> dict[str, Any]:
        """Start or find the process, and wait for it."""
        found: dict[str, Any] = self.execute_resumable(context)
        return found

    def resume(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Continue when the process has ended."""
        with airflow_errors():
            self._waited = str(event["run"])
            return self._result(self.open(context))

    def submit_job(self, context: Context) -> str:
        """Start the process, or find the one that runs; returns the run's URI."""
        from trainwright.tasks.runs.artefacts import Result
        from trainwright.tasks.train.launcher import background

        found = self.open(context)
        if not found.run.has(Result):
            background.start(found)
        return found.run.uri

    def get_job_status(self, external_id: Any, context: Context) -> str:
        """`running`, `success`, or `failed`: then it starts again, from the newest checkpoint."""
        from trainwright.tasks.runs.artefacts import Result
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
        """Wait for the process, deferred or here. Returns the reference.

        On attaching again, Airflow takes what this returns for the result.
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
        """The reference, or the error that ended training."""
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
            found.run.note(state="success", step=None)  # nothing works on the run any more
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
            self.log.info("%s", line)

    def _free(self, found: RunContext) -> None:
        found.ledger.release(found.run.uri, holder=found.holder.name)
