"""What passes and messages of pipelines take ranks of this machine: `calibrate` measures it.

Plans assume `PRIOR_PASSES` until then.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from trainwright.estimator.machine import machine_key
from trainwright.estimator.named_file import write_named
from trainwright.estimator.predict.pass_cost import PassCost
from trainwright.tasks import progress
from trainwright.tasks.estimate.training_probe import can_train, measured_by
from trainwright.tasks.settings import Settings

PASSES_S = 2.0
"""plus the time in which two processes load torch and the model is cut, some 8 s"""


def passes_file(settings: Settings) -> Path:
    """The path of this machine's measured cost."""
    return settings.home / "passes" / f"cpu-{machine_key()}.json"


def known_passes(settings: Settings) -> PassCost | None:
    """The cost that was measured on this machine; None: not measured."""
    path = passes_file(settings)
    if not path.exists():
        return None
    try:
        return PassCost.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        progress.emit("notice", message=f"passes: {path}: not a cost, or truncated: not used")
        return None


def renew_passes(settings: Settings) -> PassCost | None:
    """Measure the cost, and cache it; None if no training can run here.

    Raises BadInput if it can't be written, TrainwrightError if it can't be measured.
    """
    if not can_train("what passes of pipelines take"):
        return None
    module = "trainwright.tasks.train.worker.measure_passes"
    found = measured_by(module, "passes of pipelines", PASSES_S)
    write_named(passes_file(settings), found, "TRAINWRIGHT_HOME")
    return PassCost.model_validate_json(found)
