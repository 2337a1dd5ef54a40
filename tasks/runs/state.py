"""How a run is shown: `running` only while somebody works on it, or keeps it for the next step.

status.json says what the last step noted. Whoever is killed notes nothing, and who does a single step of a run in a DAG of their
own can't know whether another follows: then the ledger's hold on the run ends, and nobody renews it.
"""

from __future__ import annotations

from trainwright.tasks.errors import ServiceUnreachable
from trainwright.tasks.leases.ledger import Ledger
from trainwright.tasks.runs.artefacts import Status
from trainwright.tasks.runs.run import Run

LEFT = "left"


def shown_state(run: Run, status: Status) -> str:
    """The status's state; of a run that is noted as running, and that nobody holds any more:

    `interrupted` where a step had begun, `left` where its last step is done and no other came. What only another machine's
    ledger knows is shown as it is noted, and so is everything while the ledger is away.
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
