"""Ranks of a layout that are threads of this process, with real messages between them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore

from trainwright.estimator.structure import LayerFacts, Structure
from trainwright.estimator.trace import source
from trainwright.estimator.trace.source import BatchSpec
from trainwright.estimator.trace.trace import TrainingStepSpec, trace
from trainwright.tasks.data import dataset as data
from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline, Stage, Sync
from trainwright.tasks.train import TrainRequest
from trainwright.tasks.train.checkpoint.files import MODEL, OPTIMIZER
from trainwright.tasks.train.exchange.group_exchange import Exchange
from trainwright.tasks.train.exchange.transfers import MessageOrder, Transfers
from trainwright.tasks.train.rank.rank import Rank

WAIT_S = 240
_STRUCTURES: dict[str, Structure] = {}
"""by source, configuration, rows, optimizer, precision and batch"""


class Threads:
    """What the ranks share: the tensors that they are summing."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size)
        self.given: dict[tuple[str, int, int], torch.Tensor] = {}
        self.one_at_a_time = threading.Lock()
        """for what uses torch's random numbers, which threads share"""


class ThreadExchange(Exchange):
    """The exchange of one rank, a thread: sums of all in memory, messages over the loopback."""

    def __init__(self, rank: int, threads: Threads, store: Path) -> None:
        self.rank, self.size, self.wait_s, self.step = rank, threads.size, 0.0, 0
        self._threads, self._rounds = threads, dict[str, int]()
        self.summed_bytes = Counter[str]()
        """by name of the sum"""
        self._transfers: Transfers | None = Transfers(
            rank, self.size, FileStore(str(store), self.size), "127.0.0.1", 10.0, WAIT_S
        )

    @property
    def transfers(self) -> Transfers | None:
        return self._transfers

    def _wait(self, act: Callable[[], Any]) -> Any:
        return act()

    def start_sum(
        self, tensor: torch.Tensor, name: str, group: Any = None, *, order: MessageOrder = "started"
    ) -> Any:
        self.summed_bytes[name] += tensor.nbytes
        return super().start_sum(tensor, name, group, order=order)

    def _sum_of_all(
        self, tensor: torch.Tensor, name: str, order: MessageOrder
    ) -> Callable[[], object]:
        self._rounds[name] = number = self._rounds.get(name, 0) + 1
        self._threads.given[name, number, self.rank] = tensor.cpu().clone()

        def end() -> None:
            self._threads.barrier.wait(WAIT_S)
            total = self._threads.given[name, number, 0].clone()
            for rank in range(1, self.size):
                total += self._threads.given[name, number, rank]
            tensor.copy_(total)
            self._threads.barrier.wait(WAIT_S)

        return end

    def shutdown(self) -> None:
        """Sums of all are possible afterwards."""
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None


class OneAtATime(Rank):
    """A rank that builds its model while no other does: threads share torch's random numbers."""

    lock = threading.Lock()

    def _newly_built(self, held: Any = None) -> torch.nn.Module:
        with self.lock:
            return super()._newly_built(held)


def whole_state(rank: Rank) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Model and optimizer as a checkpoint holds them; all ranks call it at once."""
    found: list[Any] = [rank.written_state([one]) for one in range(rank.collective.size)]
    own = found[rank.collective.rank]
    return own.get(MODEL, {}), own.get(OPTIMIZER, {})


def structure_of(asked: TrainRequest, batch: int = 16, optimizer: str = "sgd") -> Structure:
    """The structure of a request's model, traced in its precision; each model once."""
    job = asked.job
    assert job.model is not None
    schema = asked.schema_
    spec = BatchSpec(
        inputs={name: tuple(shape) for name, shape in schema.inputs.items()},
        input_dtypes=schema.input_dtypes,
        target_dtype=schema.target_dtype,
        target_shape=schema.target_shape,
        classes=len(schema.classes or ()),
        task=schema.task,
    )
    folder, train = Path(asked.source_folder), (optimizer, job.train.precision)
    code = tuple((one.name, one.read_text()) for one in sorted(folder.glob("*.py")))
    key = repr((code, asked.entry, job.model.config, spec, train, batch))
    if key not in _STRUCTURES:
        definition = source.load(folder, asked.entry)
        what = TrainingStepSpec(
            definition, job.model.config, spec, {"name": optimizer}, job.train.precision
        )
        _STRUCTURES[key] = trace(what, batch)
    return _STRUCTURES[key].model_copy(deep=True)


def layers_of(asked: TrainRequest) -> list[LayerFacts]:
    """The layers of a request's model."""
    return [one.facts() for one in structure_of(asked).layer_work]


def with_layout(
    asked: TrainRequest,
    sync: dict[str, Sync],
    rows: dict[str, list[int]] | None = None,
    **fields: Any,
) -> TrainRequest:
    """The request with a layout on its plan's devices."""
    devices = asked.plan.devices
    cuts = {
        layer: {
            device.id: (sum(counts[:number]), sum(counts[: number + 1]))
            for number, device in enumerate(devices)
        }
        for layer, counts in (rows or {}).items()
    }
    layout = Layout(
        name="mixed",
        pipelines=[
            Pipeline(micro_batches=[one.batch_size], stages=[Stage(device=one.id, layers=["Net"])])
            for one in devices
        ],
        sync=sync,
        rows=cuts,
        **fields,
    )
    plan = asked.plan.model_copy(update={"layout": layout, "layers": layers_of(asked)})
    return asked.model_copy(update={"plan": plan})


def train_in_threads(
    asked: TrainRequest,
    store: Path,
    then: Callable[[Rank], Any],
    most_steps: int = 10**9,
    before: Callable[[Rank, int], Any] = lambda rank, step: None,
    rate: Callable[[int], float] | None = None,
    devices: Sequence[str] = (),
) -> list[Any]:
    """Train the request's epochs; the results of `then` on every rank, called by all at once.

    All call `before` with the number of the step that follows. `rate` gives a step's learning rate.
    `devices` are torch's, by rank; all CPUs if there are none.
    """
    size = len(asked.plan.devices)
    shared, dataset = Threads(size), data.load(asked.job.data, asked.job.train.seed)

    def work(number: int) -> Any:
        exchange = ThreadExchange(number, shared, store)
        try:
            with shared.one_at_a_time:
                device = torch.device(devices[number] if devices else "cpu")
                rank = OneAtATime(asked, dataset, exchange, device, number)
            shared.barrier.wait(WAIT_S)  # a step would seed torch while another rank is made
            if rank.layout.has_stages:
                rank.begin_anew(list(range(size)))
            shared.barrier.wait(WAIT_S)
            rank.cut(list(range(size)))
            step = 0
            for epoch in range(asked.job.train.epochs):
                order = rank.epoch_order(epoch)
                for at in range(0, len(order), asked.plan.global_batch_size):
                    if step < most_steps:
                        before(rank, step)
                        rank.learning_rate = rate(step) if rate else asked.learning_rate
                        rank.step(order, at, step)
                        rank.update(rank.learning_rate)
                        rank.average_if_due()
                        step += 1
            rank.average(moments=True)
            return then(rank)
        except BaseException:
            shared.barrier.abort()
            raise
        finally:
            exchange.shutdown()

    torch.set_num_threads(1)
    with ThreadPoolExecutor(size) as threads:
        ranks = [threads.submit(work, rank) for rank in range(size)]
        # The others of a rank that fails report only that it is gone.
        errors = [error for one in ranks if (error := one.exception()) is not None]
        own = [one for one in errors if not isinstance(one, OSError | threading.BrokenBarrierError)]
        for error in own or errors:
            raise error
        return [one.result() for one in ranks]
