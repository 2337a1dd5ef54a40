"""The command line of a rank: `python -m trainwright.tasks.train.worker.entry ORDER.json RANK`.

The launcher starts it, here or on another host. If RANK is `spare`, the process loads its code and
waits until it replaces a lost process. `torchrun` starts it without RANK. `member` is the work of a
rank.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

from trainwright.infra.private_files import keep_private
from trainwright.tasks.train.channel import under_torchrun
from trainwright.tasks.train.launcher.rank_process import SPARE
from trainwright.tasks.train.worker.low_priority import at_low_priority

_MEMBER = "trainwright.tasks.train.worker.member"


def main(order: Path, place: str) -> int:
    """Run a rank and return its exit code. A spare process loads at low priority."""
    keep_private()
    member = at_low_priority(_loaded) if place == SPARE else _loaded()
    return int(member.main(order, place))


def _loaded() -> ModuleType:
    """The module, with torch. Its import makes objects that stay, so none is searched."""
    gc.disable()
    try:
        return importlib.import_module(_MEMBER)
    finally:
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    given = [*sys.argv[1:], *([os.environ["RANK"]] if under_torchrun() else [])]
    if len(given) != 2 or not Path(given[0]).is_file():
        shown = " ".join(sys.argv[1:]) or "nothing"
        sys.stderr.write(
            f"ORDER.json: got {shown}; allowed: the order.json in the work folder of a training\n"
        )
        sys.exit(2)
    code = main(Path(given[0]), given[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Horovod's threads may block the interpreter's exit if a peer is gone
