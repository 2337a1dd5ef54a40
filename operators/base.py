"""What every operator shares: which run it works on, how errors reach Airflow, how it is stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import AirflowFailException

from trainwright.operators.hooks import connected, connection_ids
from trainwright.operators.links import LINKS
from trainwright.tasks.errors import (
    BadInput,
    BusyMachine,
    Interrupted,
    MustWait,
    RunHeld,
    ServiceUnreachable,
    TrainwrightError,
)
from trainwright.tasks.spec.documents import parse_text

if TYPE_CHECKING:
    from trainwright.tasks.runs.run import Run


class StepOperator(BaseOperator):
    """A step of a run. Give it `run` (what an upstream step returned, or a run's URI) or a `job` to open a run for.

    | input | default | meaning |
    |---|---|---|
    | `run` *(templated)* | none | the reference that another step returned, or a run's URI |
    | `job` *(templated)* | none | a job file, or the job as a mapping or its JSON; steps that are missing are done first |
    | `device_pool` *(templated)* | the job's | a pool file |
    | `store` *(templated)* | the settings' | where runs are kept |
    | `new` *(templated)* | False | with `job`: start afresh instead of continuing an unfinished run; a retry goes on |
    | `replay` *(templated)* | none | URI of a run whose plan, learning rate and split events are used again |
    | `store_conn_id` *(templated)* | [trainwright] | connection to the object store; none: the environment's |
    | `ledger_conn_id` *(templated)* | [trainwright] | connection to the ledger of leases; none: the environment's |
    | `ssh_conn_id` *(templated)* | [trainwright] | login to hosts whose pool file does not say how; none: the environment's |

    Returns a small JSON reference: `{"run": URI, "artefact": file, …summary}`.

    | failure | what Airflow does |
    |---|---|
    | bad input, rejected data, infeasible plan, failed training | fails at once, no retry |
    | a service out of reach, devices held past `queue_timeout`, run held by another, killed | fails; retried as `retries` say |

    A task that has to wait for devices is deferred: it holds no worker slot until its turn comes.
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
    )
    operator_extra_links = LINKS
    step: ClassVar[str]
    shown_run: tuple[str, str] | None = None
    """job name and id of the run it works on, once it knows, where the page can show it"""

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
        self._waited: str | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        """Do the step. Errors that a retry can't mend become AirflowFailException."""
        with airflow_errors(), connected(self.connections()):
            return self.work(context)

    def connections(self) -> dict[str, str]:
        """The connections to use, by field."""
        return connection_ids(
            given(self.store_conn_id), given(self.ledger_conn_id), given(self.ssh_conn_id)
        )

    def resume(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Go on after waiting for devices, on the run that waited."""
        self._waited = str(event["run"])
        return self.execute(context)

    def work(self, context: Context) -> dict[str, Any]:
        """The step on its run; the steps before it are done first where they are missing."""
        from trainwright.operators.triggers import DevicesTrigger
        from trainwright.tasks import step, steps
        from trainwright.tasks.allocate import acquire
        from trainwright.tasks.settings import settings

        run = self.open(context)
        waits = False
        try:
            # `trainwright run` has a process of its own, which waits; a worker's slot is for work.
            with contextlib.nullcontext() if settings().holder else acquire.deferring():
                reference = steps.do(run, self.step, given(self.replay))
            if not self.reference():
                run.note(
                    state="success", step=None
                )  # what was asked for is done: nothing works on the run any more
            return reference
        except MustWait:
            waits = True
            trigger = DevicesTrigger(
                run=run.uri, holder=step.holder(run).name, connections=self.connections()
            )
            self.defer(trigger=trigger, method_name="resume")
            raise AssertionError("defer returns") from None
        finally:
            if not waits and not self.reference():
                # What it took itself nobody else gives back, but for AllocateOperator's devices.
                mine = [run.hold] if self.step == "allocate" else None
                step.ledger().release(run.uri, mine, holder=step.holder(run).name)

    def reference(self) -> str | None:
        """The URI of the run that `run` names; None where this operator opens one for its `job`."""
        return given(self.run.get("run") if isinstance(self.run, dict) else self.run)

    def open(self, context: Context) -> Run:
        """The run to work on."""
        from trainwright.tasks.settings import settings

        run = self._open(context)
        ours = connection_ids(None, None).get("store_conn_id") == self.connections().get(
            "store_conn_id"
        )
        if ours and run.store_uri.rstrip("/") == settings().store.rstrip("/"):
            self.shown_run = (run.job_name, run.id)
        return run

    def _open(self, context: Context) -> Run:
        from trainwright.tasks import step, steps
        from trainwright.tasks.leases.ledger import Holder
        from trainwright.tasks.runs.run import Run, replayed
        from trainwright.tasks.spec.job import load_job

        dag_run = context["dag_run"]
        owner = step.act_as(Holder(f"Airflow {dag_run.dag_id} {dag_run.run_id}"))
        uri = self._waited or self.reference()
        if uri:
            return Run(uri)
        if not isinstance(self.job, dict) and given(self.job) is None:
            raise BadInput(f"{self.task_id}: got neither `run` nor `job`; allowed: one of them")
        job = load_job(_mapping(self.job), given(self.device_pool))
        replay = given(self.replay)
        if replay is not None:
            replayed(replay, job)
        new, store = replay is not None or str(self.new).lower() == "true", given(self.store)
        # Where an earlier DAG run did one of these steps, its result is not this one's.
        lacking = steps.ORDER[self.step][1] if self.step in ("train", "store", "analyze") else None
        # A retry goes on with what its own DAG run began anew.
        return steps.open_for(
            job, owner, store=store, worker=owner.name if new else None, lacking=lacking
        )

    def on_kill(self) -> None:
        """Stop the running step; training saves a checkpoint first."""
        from trainwright.tasks import step

        step.stop.set()


@contextlib.contextmanager
def airflow_errors() -> Iterator[None]:
    """What a retry can't mend becomes AirflowFailException; the rest is raised as it is."""
    try:
        yield
    except (ServiceUnreachable, RunHeld, BusyMachine, Interrupted):
        raise
    except TrainwrightError as error:
        raise AirflowFailException(f"{error.kind}: {error}") from error


def _mapping(job: dict[str, Any] | str | None) -> dict[str, Any] | str:
    """A job as it was given: a mapping, also as the JSON that a template makes of one, or a file's path."""
    if isinstance(job, dict):
        return job
    text = given(job) or ""
    return parse_text(text, "job") if text.startswith("{") else text


def given(value: object) -> str | None:
    """A templated text field: None where it is empty, or where the template rendered None."""
    text = "" if value is None else str(value).strip()
    return None if text in ("", "None") else text
