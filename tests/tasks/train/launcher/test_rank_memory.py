"""A rank keeps freed memory after its first update, and not before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TRAIN = Path(__file__).parents[1]
_CODE = """
import ctypes
import resource
import sys
from pathlib import Path

import torch
from training_case import request

from trainwright.estimator.memory.freed_memory import map_blocks
from trainwright.tasks.data import dataset as data
from trainwright.tasks.train.batch.sampling import epoch_order
from trainwright.tasks.train.exchange.collective import TorchCollective
from trainwright.tasks.train.rank.rank import Rank

def new_pages():
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        bytearray(b"x") * 2**22
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return faults

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: pages of 4 KiB, which are counted
map_blocks()
folder = Path(sys.argv[1])
asked = request(folder, [60])
collective = TorchCollective(0, 1, str(folder / "meeting"))
rank = Rank(asked, data.load(asked.job.data), collective, torch.device("cpu"), 0)
rank.step(epoch_order(rank.train_rows, 0, 0), 0, 0)
print(new_pages())
rank.update(0.01)
print(new_pages())
collective.shutdown()
"""


def test_a_rank_keeps_freed_memory_after_its_first_update(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CODE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TRAIN, TRAIN.parents[1])))},
    )
    before, after = map(int, done.stdout.split())
    assert before > 1000 > 100 > after
