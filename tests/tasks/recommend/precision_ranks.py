"""One of two ranks that train one generated model after another for a few steps.

    python precision_ranks.py REQUESTS NUMBER MEETING

REQUESTS: training requests, a line each. MEETING: a file by which the ranks meet. Prints a line of
JSON for each request: the losses, the metrics of the held-out rows, and the SHA-256 of the
parameters.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

from trainwright.tasks.data import dataset
from trainwright.tasks.train.batch.sampling import epoch_order
from trainwright.tasks.train.exchange.collective import TorchCollective
from trainwright.tasks.train.rank.rank import Rank
from trainwright.tasks.train.request import TrainRequest
from trainwright.tasks.train.worker.lr_ramp import begin_search
from trainwright.tasks.train.worker_group import WorkerGroup

STEPS = 3


def main(requests: Path, number: int, meeting: str) -> None:
    """Train all."""
    torch.set_num_threads(1)
    collective = TorchCollective(number, 2, meeting)
    group = WorkerGroup(generation=1, members=[0, 1])
    for line in requests.read_text().splitlines():
        asked = TrainRequest.model_validate_json(line)
        data = dataset.load(asked.job.data)
        rank = Rank(asked, data, collective, torch.device("cpu"), number)
        begin_search(rank, group)
        order = epoch_order(rank.train_rows, 0, 0)
        losses = []
        for step in range(STEPS):
            losses.append(rank.step(order, step * sum(rank.split), step).loss)
            rank.update(asked.learning_rate)
        content = b"".join(
            one.detach().float().numpy().tobytes() for one in rank.model.parameters()
        )
        found = {
            "losses": losses,
            "metrics": rank.validate().metrics,
            "model": hashlib.sha256(content).hexdigest(),
        }
        sys.stdout.write(json.dumps(found) + "\n")
    collective.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
