"""`StepOperator`, the base of all operators: opens the run, maps errors, handles stops."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator, BaseOperatorLink, Context

from trainwright.operators.failures import airflow_errors, lines_in_log
from trainwright.operators.hooks import CONNECTION_FIELDS, connection_ids, settings_of
from trainwright.operators.links import LINKS
from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.documents import parse_text

if TYPE_CHECKING:
    from trainwright.tasks.chain import StepSpec
    from trainwright.tasks.context import RunContext
    from trainwright.tasks.settings import Settings


REFUSED = "refused"
"""Key of what a template renders instead of a job: why the trigger's form gives none."""


class StepOperator(BaseOperator):
    """One step of a run. Pass either `run` (an upstream step's result, or a run's URI) or `job`.

    With `job` the operator opens a run and first does the earlier steps that are missing.

    | input | default | meaning |
    |---|---|---|
    | `run` *(templated)* | none | the reference that another step returned, or a run's URI |
    | `job` *(templated)* | none | a job file's path, or the job as a mapping or as JSON |
    | `device_pool` *(templated)* | the job's | a pool file |
    | `store` *(templated)* | as configured | the URI of the store |
    | `new` *(templated)* | False | with `job`: start a new run (retries of the task continue it) |
    | `replay` *(templated)* | none | URI of a run whose plan, rate and splits are used again |
    | `store_conn_id` *(templated)* | [trainwright] | connection to the object store |
    | `ledger_conn_id` *(templated)* | [trainwright] | connection to the ledger of leases |
    | `ssh_conn_id` *(templated)* | [trainwright] | ssh login, unless the pool file has one |
    | `slurm_conn_id` *(templated)* | [trainwright] | Slurm's options that the pool file lacks |
    | `kubernetes_conn_id` *(templated)* | [trainwright] | API server, unless the pool has `api` |

    A connection that neither the input nor the configuration names comes from the environment.

    Returns a small JSON reference: `{"run": URI, "artefact": file, …summary}`.

    | failure | what Airflow does |
    |---|---|
    | bad input, rejected data, infeasible plan, failed training | fails without a retry |
    | unreachable service, `queue_timeout` over, another process holds the run, killed | retries |

    A task that waits for devices is deferred: it occupies no worker slot.
    """

    template_fields: Sequence[str] = (
        "run",
        "job",
        "device_pool",
        "store",
        "new",
        "replay",
        "store_conn_id",
        "ledger_conn_id",
        "ssh_conn_id",
        "slurm_conn_id",
        "kubernetes_conn_id",
    )
    operator_extra_links: tuple[BaseOperatorLink, ...] = LINKS
    step: ClassVar[str]
    function_returns: ClassVar[str] = "job"
    """the input that the function returns if the operator is used as a TaskFlow decorator"""
    shown_run: tuple[str, str] | None = None
    """Job name and id of the task's run, if it is open and the page can show it."""

    def __init__(
        self,
        *,
        run: dict[str, Any] | str | None = None,
        job: dict[str, Any] | str | None = None,
        device_pool: str | None = None,
        store: str | None = None,
        new: bool | str = False,
        replay: str | None = None,
        store_conn_id: str | None = None,
        ledger_conn_id: str | None = None,
        ssh_conn_id: str | None = None,
        slurm_conn_id: str | None = None,
        kubernetes_conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.run = run
        self.job = job
        self.device_pool = device_pool
        self.store = store
        self.new = new
        self.replay = replay
        self.store_conn_id = store_conn_id
        self.ledger_conn_id = ledger_conn_id
        self.ssh_conn_id = ssh_conn_id
        self.slurm_conn_id = slurm_conn_id
        self.kubernetes_conn_id = kubernetes_conn_id
        self._waited: str | None = None
        self._found: RunContext | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        """Do the step. Errors that a retry cannot fix become AirflowFailException."""
        with airflow_errors(), lines_in_log():
            return self.work(context)

    @property
    def opened(self) -> RunContext:
        """The run that this task works on. Call `open` first."""
        assert self._found is not None
        return self._found

    def connections(self) -> dict[str, str]:
        """The connections to use, by field."""
        return connection_ids({field: given(getattr(self, field)) for field in CONNECTION_FIELDS})

    def settings(self) -> Settings:
        """The settings, with this task's connections applied."""
        return settings_of(self.connections())

    def resume(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Continue after a deferral, with the run that waited."""
        self._waited = str(event["run"])
        return self.execute(context)

    def work(self, context: Context) -> dict[str, Any]:
        """Do the step, and before it the earlier steps that are missing."""
        from trainwright.operators.triggers import DevicesTrigger
        from trainwright.tasks import chain
        from trainwright.tasks.errors import MustWait

        found = self.open(context)
        waits = False
        try:
            reference = chain.do(found, self.step)
            if not self.reference():
                found.run.note(state="success", step=None)  # no process works on the run now
            return reference
        except MustWait:
            waits = True
            trigger = DevicesTrigger(
                found.run.uri, found.holder.name, connections=self.connections()
            )
            self.defer(trigger=trigger, method_name="resume")
            raise AssertionError("defer returns") from None
        finally:
            if not waits and not self.reference():
                # This task leased the run, so it releases it. The devices that AllocateOperator
                # leased stay: the training and ReleaseOperator need them.
                mine = [found.run.hold] if self.step == "allocate" else None
                found.ledger.release(found.run.uri, mine, holder=found.holder.name)

    def reference(self) -> str | None:
        """The URI of the run in `run`; None if this operator opens one for its `job`."""
        return given(self.run.get("run") if isinstance(self.run, dict) else self.run)

    def open(self, context: Context) -> RunContext:
        """Open or attach to the run; this DAG run becomes its holder."""
        found = self._found = self._open(context)
        run, configured = found.run, settings_of(connection_ids())
        ours = connection_ids().get("store_conn_id") == self.connections().get("store_conn_id")
        if ours and run.store_uri.rstrip("/") == configured.store.rstrip("/"):
            self.shown_run = (run.job_name, run.id)
        return found

    def _open(self, context: Context) -> RunContext:
        from trainwright.tasks import chain
        from trainwright.tasks.context import RunContext
        from trainwright.tasks.leases.ledger import Holder
        from trainwright.tasks.leases.tables import dag_run_holder
        from trainwright.tasks.runs.run import Run, replayed
        from trainwright.tasks.spec.job import load_job

        settings, replay = self.settings(), given(self.replay)
        dag_run = context["dag_run"]
        name = dag_run_holder(dag_run.dag_id, dag_run.run_id)
        terms: dict[str, Any] = {
            "defers": True,
            "replay": Run(replay, settings) if replay is not None else None,
        }
        if uri := self._waited or self.reference():
            return RunContext.attach(Run(uri, settings), name, **terms)
        if not isinstance(self.job, dict) and given(self.job) is None:
            raise BadInput(f"{self.task_id}: pass either `run` or `job`")
        job = load_job(_mapping(self.job), given(self.device_pool))
        if replay is not None:
            replayed(replay, job, settings)
        new = replay is not None or str(self.new).lower() == "true"
        once = {one.name: one.artefact for one in chain.steps() if one.once_per_dag_run}
        return RunContext.open(
            job,
            settings,
            Holder(name),
            store=given(self.store),
            worker=name if new else None,  # a retry continues the run that its DAG run started
            lacking=once.get(self.step),
            **terms,
        )

    def on_kill(self) -> None:
        """Stop the running step; a training saves a checkpoint first."""
        if self._found is not None:
            self._found.stop.set()


def operator_of(step: StepSpec) -> type[StepOperator]:
    """The operator class of a step."""
    module, _, name = step.operator.partition(":")
    found: type[StepOperator] = getattr(importlib.import_module(module), name)
    return found


def _mapping(job: dict[str, Any] | str | None) -> dict[str, Any] | str:
    """The job as a mapping, parsed from JSON if a template rendered it, or the path of a file."""
    if isinstance(job, dict):
        return job
    text = given(job) or ""
    if not text.startswith("{"):
        return text
    found = parse_text(text, "job")
    if REFUSED in found:
        raise BadInput(str(found[REFUSED]))
    return found


def given(value: object) -> str | None:
    """A templated text field; None if it is empty or the template rendered `None`."""
    text = "" if value is None else str(value).strip()
    return None if text in ("", "None") else text
