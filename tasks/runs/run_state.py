"""The state that users see: `running` only while a process holds the run.

status.json has the state that the last step recorded. A killed process records nothing, and a
step that is used alone in a DAG cannot know whether another follows. In both cases the hold on
the run expires in the ledger, because no process renews it.
"""

from __future__ import annotations

from trainwright.tasks.errors import ServiceUnreachable
from trainwright.tasks.leases.ledger import Ledger
from trainwright.tasks.runs.artefacts.run_status import Status
from trainwright.tasks.runs.run import Run

LEFT = "left"


def shown_state(run: Run, status: Status) -> str:
    """The recorded state, except for a run that is recorded as running but that no process holds.

    Such a run is `interrupted` if a step had begun, `left` if its last step is done and none
    followed. If this machine's ledger does not know the run, or is unreachable, the recorded
    state is returned.
    """
    if status.state != "running":
        return status.state
    try:
        held = Ledger(run.settings.ledger_url).holds(run.uri, run.hold)
    except ServiceUnreachable:
        return status.state
    if held or (held is None and not run.work_path.exists()):
        return status.state
    return LEFT if status.step is None else "interrupted"
