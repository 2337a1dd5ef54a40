"""A rank: `python -m trainwright.tasks.train.worker ORDER.json`, started by `launch` with its place in the environment.

It speaks to the launcher through a pipe, one JSON object a line: ready, progress, epoch, split, done, error.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch  # noqa: TID253 - this is a process of its own

from trainwright.estimator import source as model_source
from trainwright.estimator.devices import EMULATED_SAMPLE_S
from trainwright.tasks import data
from trainwright.tasks.artefacts import SplitEvent
from trainwright.tasks.errors import TrainingFailed, TrainwrightError
from trainwright.tasks.objects import FolderStore, ObjectStore, open_store
from trainwright.tasks.train import checkpoint, cpu_share
from trainwright.tasks.train.batch_norm import join_batch_norms
from trainwright.tasks.train.batches import epoch_order, own_part, shares, steps_per_epoch
from trainwright.tasks.train.collective import Collective, connect, sum_, take_from_first
from trainwright.tasks.train.gradients import GradientSum
from trainwright.tasks.train.metrics import Rows
from trainwright.tasks.train.optimization import learning_rate_at, make_optimizer
from trainwright.tasks.train.rebalance import Rebalancer
from trainwright.tasks.train.request import Order

WINDOW_STEPS = 20
WINDOW_S = 1.5  # shorter windows measure the machine's noise
DIVERGED = 4.0
_PRECISIONS = {"fp32": torch.float32, "fp64": torch.float64}


class Channel:
    """The way to the launcher."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._last = 0.0

    def send(self, kind: str, **fields: Any) -> None:
        """Say something; the launcher is gone where that fails, and so should we be."""
        os.write(self._descriptor, (json.dumps({"kind": kind, **fields}) + "\n").encode())

    def progress(self, **fields: Any) -> None:
        """Say how far we are, a few times a second at most."""
        if time.monotonic() - self._last > 0.25:
            self._last = time.monotonic()
            self.send("progress", **fields)


class Rank:
    """One rank's model, data and place among the others."""

    def __init__(self, order: Order, collective: Collective, channel: Channel, device: torch.device) -> None:
        request = self.request = order.request
        self.order, self.collective, self.channel, self.device = order, collective, channel, device
        self.rank, self.size = collective.rank, collective.size
        self.spec = request.job.train
        self.planned = request.plan.devices[self.rank]
        self.dtype = _PRECISIONS[self.spec.precision]
        torch.set_default_dtype(self.dtype)
        self.stop_asked = False
        signal.signal(signal.SIGTERM, self._on_term)

        dataset = data.load(request.job.data)
        if dataset.schema.sha256 != request.schema_.sha256:
            raise TrainingFailed(f"{request.job.data.uri}: the data changed since it was validated")
        self.inputs = {name: self._tensor(array) for name, array in dataset.inputs.items()}
        self.targets = self._tensor(dataset.targets)
        self.train_rows, self.validation_rows = data.split_rows(
            dataset.schema.rows, request.job.data.validation_fraction, self.spec.seed
        )
        definition = model_source.load(Path(request.source_folder), request.entry)
        torch.manual_seed(self.spec.seed)
        model = model_source.build(definition, request.job.model.config if request.job.model else {})
        self.names = list(model.state_dict())
        self.model = model.to(device=device, dtype=self.dtype)
        self.loss = model_source.loss_function(definition, request.schema_.task)
        self.joined = join_batch_norms(self.model, collective)
        self.classifies = request.schema_.task.endswith("classification")
        take_from_first(collective, [value.data for value in self.model.state_dict().values()], "initial")
        self.optimizer = make_optimizer(self.model.parameters(), self.spec.optimizer, request.learning_rate or 1.0)
        self.sum_gradients = GradientSum(self.model.parameters(), collective)
        self.split = [one.batch_size for one in request.plan.devices]

    def _on_term(self, *_: object) -> None:
        self.stop_asked = True

    def _tensor(self, array: Any) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.to(device=self.device, dtype=self.dtype if tensor.is_floating_point() else tensor.dtype)

    def batch(self, rows: Any) -> tuple[Any, torch.Tensor]:
        """Inputs (a tensor, or a dict of several) and targets of some rows."""
        index = torch.as_tensor(rows, device=self.device)
        inputs = {name: tensor[index] for name, tensor in self.inputs.items()}
        return next(iter(inputs.values())) if len(inputs) == 1 else inputs, self.targets[index]

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers under the names that the model's source gives them."""
        return dict(zip(self.names, self.model.state_dict().values(), strict=True))

    def correct(self, outputs: Any, targets: torch.Tensor) -> float:
        """How many are classified rightly; 0 where nothing is classified."""
        if not self.classifies or not isinstance(outputs, torch.Tensor):
            return 0.0
        return float((outputs.argmax(dim=1) == targets).sum())

    def gradients(self, order: Any, step_in_epoch: int, step: int) -> tuple[float, float, int, bool, float]:
        """Forward, backward and sum; the joint loss, rightly classified, samples, whether to stop, seconds of own work."""
        rows, total = own_part(order, step_in_epoch, self.split, self.rank)
        started, waited = time.perf_counter(), self.collective.wait_s
        torch.manual_seed((self.spec.seed * 1_000_003 + step) * 4096 + self.rank)  # dropout: the same in a replay
        weight = len(rows) / total
        if len(rows) == 0:  # take part in every sum, with a sample that does not count
            rows = order[:1]
        for joint in self.joined:
            joint.weight_of_batch = 1.0 if weight else 0.0
        inputs, targets = self.batch(rows)
        self.optimizer.zero_grad(set_to_none=True)
        outputs = self.model(inputs)
        loss = self.loss(outputs, targets)
        (loss * weight).backward()
        own = time.perf_counter() - started - (self.collective.wait_s - waited)
        if self.planned.speed is not None:
            target = EMULATED_SAMPLE_S * weight * total / self.planned.speed
            time.sleep(max(0.0, target - own))
            own = max(own, target)
        self.sum_gradients.start()
        joint = [float(loss.detach()), self.correct(outputs, targets)] if weight else [0.0, 0.0]
        figures = torch.tensor([joint[0] * weight, joint[1], self.stop_asked], dtype=torch.float64)
        handle = self.collective.start_sum(figures, "figures")
        self.sum_gradients.finish()
        self.collective.finish(handle)
        return float(figures[0]), float(figures[1]), total, bool(figures[2] > 0), own

    def update(self, learning_rate: float) -> None:
        """One step of the optimizer with the summed gradients, clipped by their joint norm."""
        if self.spec.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Loss (and accuracy) on the held-out rows, each rank its share of them."""
        parts = shares(len(self.validation_rows), self.split)
        begin = sum(parts[: self.rank])
        rows = self.validation_rows[begin : begin + parts[self.rank]]
        self.model.eval()
        figures = torch.zeros(3, dtype=torch.float64)
        size = max(1, self.split[self.rank])
        for at in range(0, len(rows), size):
            inputs, targets = self.batch(rows[at : at + size])
            outputs = self.model(inputs)
            count = len(targets)
            figures += torch.tensor([float(self.loss(outputs, targets)) * count, self.correct(outputs, targets), count])
        self.model.train()
        sum_(self.collective, figures, "validation")
        loss, correct, count = figures.tolist()
        found = {"loss": loss / count}
        return found | {"accuracy": correct / count} if self.classifies else found


def ramp(rank: Rank) -> list[dict[str, Any]]:
    """Raise the learning rate step by step; loss and accuracy of each, until the loss runs away."""
    points: list[dict[str, Any]] = []
    rates, rows = rank.order.learning_rates, rank.train_rows
    per_epoch = steps_per_epoch(len(rows), sum(rank.split))
    smoothed, best = 0.0, math.inf
    order = rows
    for step, rate in enumerate(rates):
        if step % per_epoch == 0:
            order = epoch_order(rows, rank.spec.seed, step // per_epoch)
        loss, correct, total, stop, _ = rank.gradients(order, step % per_epoch, step)
        accuracy = correct / total if rank.classifies else None
        if math.isfinite(loss):
            points.append({"learning_rate": rate, "loss": loss, "accuracy": accuracy})
        smoothed = 0.9 * smoothed + 0.1 * loss
        unbiased = smoothed / (1 - 0.9 ** (step + 1))
        best = min(best, unbiased)
        if stop or not math.isfinite(loss) or unbiased > DIVERGED * best:
            break
        rank.update(rate)
        if rank.rank == 0:
            rank.channel.progress(step=step + 1, steps=len(rates), loss=loss, batch_sizes=rank.split)
    return points


class Training:
    """The loop over epochs, from the start or from a checkpoint."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        request = rank.request
        self.store: ObjectStore = (
            open_store(request.run_uri) if request.run_uri is not None else FolderStore(Path(request.work_folder))
        )
        self.steps = Rows(self.store, f"steps-rank{rank.rank}")
        self.epochs, self.splits = Rows(self.store, "epochs"), Rows(self.store, "splits")
        self.per_epoch = steps_per_epoch(len(rank.train_rows), sum(rank.split))
        self.total_steps = self.per_epoch * rank.spec.epochs
        self.state = checkpoint.State(step=0, epoch=0, split=rank.split, samples=[0] * rank.size)
        if rank.order.checkpoint is not None:
            self._load(Path(rank.order.checkpoint))
        self.replay = {event.step: event for event in request.replay_events or []}
        self.rebalancer = Rebalancer(list(rank.split))
        self.recent: list[float] = []
        self.own_times: list[float] = []
        self.epoch_loss = [0.0, 0.0]
        self.best = self._score(self.state.metrics) if self.state.metrics else -math.inf
        self.writer: Any = None
        if rank.rank == 0:
            from torch.utils.tensorboard import SummaryWriter

            events = Path(request.work_folder) / "events"
            self.writer = SummaryWriter(str(events), purge_step=self.state.step or None)  # type: ignore[no-untyped-call]

    def _load(self, folder: Path) -> None:
        from safetensors.torch import load_file

        self.state = checkpoint.State(**json.loads((folder / "state.json").read_text()))
        model = load_file(folder / "model.safetensors")
        with torch.no_grad():
            for name, value in self.rank.state().items():
                value.copy_(model[name])
        checkpoint.load_optimizer(self.rank.optimizer, load_file(folder / "optimizer.safetensors"))
        self.rank.split = list(self.state.split)

    def _score(self, metrics: dict[str, float]) -> float:
        target = self.rank.spec.target
        name = target.metric if target is not None and target.metric in metrics else "loss"
        return -metrics[name] if name == "loss" else metrics[name]

    def run(self) -> dict[str, Any]:
        """Train until the end, or until somebody asks to stop; what this rank did."""
        rank, state, spec = self.rank, self.state, self.rank.spec
        rank.model.train()
        order, stopped = None, False
        while state.step < self.total_steps and not stopped:
            epoch, step_in_epoch = divmod(state.step, self.per_epoch)
            if order is None or step_in_epoch == 0:
                order = epoch_order(rank.train_rows, spec.seed, epoch)
                epoch_started = time.perf_counter()
                self.epoch_loss = [0.0, 0.0]
            self._change_split()
            started, waited = time.perf_counter(), rank.collective.wait_s
            rate = learning_rate_at(state.step, self.total_steps, rank.request.learning_rate, spec.schedule)
            loss, correct, total, stopped, own = rank.gradients(order, step_in_epoch, state.step)
            if not math.isfinite(loss):
                raise TrainingFailed(f"the loss is {loss} at step {state.step} (learning rate {rate:.3g})")
            before = time.perf_counter()
            rank.update(rate)
            own += time.perf_counter() - before
            taken = time.perf_counter() - started
            self._record(epoch, loss, correct, total, rate, own, rank.collective.wait_s - waited, taken)
            state.step += 1
            state.epoch = epoch
            ends_epoch = state.step % self.per_epoch == 0
            if ends_epoch:
                self._end_epoch(epoch, time.perf_counter() - epoch_started)
            if (
                stopped
                or (ends_epoch and state.step == self.total_steps)
                or state.step % spec.checkpoint.every_steps == 0
            ):
                self._checkpoint()
            self._rebalance()
        if self.writer is not None:
            self.writer.close()
        return self._summary(stopped)

    def _record(
        self, epoch: int, loss: float, correct: float, total: int, rate: float, own: float, wait: float, taken: float
    ) -> None:
        rank, step = self.rank, self.state.step
        batch = shares(total, rank.split)[rank.rank]
        self.steps.add(
            step=step, epoch=epoch, rank=rank.rank, batch_size=batch, loss=loss, learning_rate=rate, compute_s=own,
            wait_s=wait, step_time_s=taken,
        )  # fmt: skip
        if total == sum(rank.split):
            self.recent.append(own)
            self.own_times.append(own)
        self.epoch_loss[0] += loss * total
        self.epoch_loss[1] += total
        self.state.samples = [a + b for a, b in zip(self.state.samples, shares(total, rank.split), strict=True)]
        if rank.rank == 0:
            self.writer.add_scalar("loss/train", loss, step)
            self.writer.add_scalar("learning_rate", rate, step)
            self.writer.add_scalar("samples_per_s", total / taken, step)
            if rank.classifies:
                self.writer.add_scalar("accuracy/train", correct / total, step)
            rank.channel.progress(
                step=step + 1, steps=self.total_steps, epoch=epoch, loss=loss, samples_per_s=total / taken,
                batch_sizes=rank.split,
            )  # fmt: skip

    def _end_epoch(self, epoch: int, duration: float) -> None:
        metrics = self.rank.validate()
        train_loss = self.epoch_loss[0] / self.epoch_loss[1] if self.epoch_loss[1] else math.nan
        self.state.metrics = {**metrics, "train_loss": train_loss}
        score = self._score(self.state.metrics)
        self.state.best = score > self.best
        if self.state.best:
            self.best = score
            if self.rank.spec.checkpoint.keep_best and self.state.step % self.rank.spec.checkpoint.every_steps:
                self._checkpoint()  # the best is kept even where no checkpoint is due
        if self.rank.rank == 0:
            self.epochs.add(
                step=self.state.step - 1, epoch=epoch, train_loss=train_loss, **metrics, duration_s=duration
            )
            for name, value in metrics.items():
                self.writer.add_scalar(f"{name}/validation", value, self.state.step)
            self.rank.channel.send("epoch", epoch=epoch, epochs=self.rank.spec.epochs, train_loss=train_loss, **metrics)

    def _checkpoint(self) -> None:
        rank = self.rank
        self.steps.write()
        if rank.rank == 0:
            self.epochs.write()
            self.splits.write()
        sum_(rank.collective, torch.zeros(1), "parts-written")  # state.json says that every rank's rows are there
        if rank.rank == 0:
            self.state.split = list(rank.split)
            checkpoint.save(self.store, self.state, rank.state(), rank.optimizer, rank.spec.checkpoint)
            rank.channel.send("checkpoint", step=self.state.step)
        self.state.best = False

    def _change_split(self) -> None:
        """A change that a replayed run made at this step."""
        event = self.replay.get(self.state.step)
        if event is not None:
            self._apply(event.batch_sizes, event.reason)

    def _rebalance(self) -> None:
        """Every so often, compare the ranks' own times, and change the split where it pays."""
        rank, spec, step = self.rank, self.rank.spec, self.state.step
        if not spec.adaptive_split or rank.request.replay_events is not None or rank.size == 1:
            return
        if step % WINDOW_STEPS != 0:
            return
        medians = torch.zeros(rank.size + 1, dtype=torch.float64)
        medians[rank.rank] = statistics.median(self.recent) if self.recent else 0.0
        medians[-1] = sum(self.recent)
        sum_(rank.collective, medians, "medians")
        *medians_s, window_s = medians.tolist()
        if window_s < WINDOW_S * rank.size:  # seconds of work that all ranks did together
            return
        self.recent = []
        decision = self.rebalancer.observe(medians_s)
        if decision is not None and step < self.total_steps:
            self._apply(*decision)

    def _apply(self, split: list[int], reason: str) -> None:
        rank, step = self.rank, self.state.step
        rank.split = list(split)
        self.recent, self.own_times = [], []
        self.state.events.append(SplitEvent(step=step, batch_sizes=rank.split, reason=reason).model_dump())
        if rank.rank == 0:
            self.splits.add(step=step, batch_sizes=rank.split, reason=reason)
            rank.channel.send("split", step=step, batch_sizes=rank.split, reason=reason)

    def _summary(self, stopped: bool) -> dict[str, Any]:
        rank, times = self.rank, sorted(self.own_times)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        interval = None
        if times:
            at = [times[min(len(times) - 1, int(share * len(times)))] for share in (0.05, 0.5, 0.95)]
            interval = {"low": at[0], "median": at[1], "high": at[2]}
        return {
            "stopped": stopped, "step": self.state.step, "epoch": self.state.epoch, "metrics": self.state.metrics,
            "events": self.state.events, "samples": self.state.samples[rank.rank], "batch_size": rank.split[rank.rank],
            "own_time_s": interval, "busy_s": sum(times), "wait_s": rank.collective.wait_s,
            "peak_memory_bytes": usage.ru_maxrss * 1024, "cpu_s": usage.ru_utime + usage.ru_stime,
            "backend": rank.collective.name,
        }  # fmt: skip


def main() -> int:
    """Do what the order says; every failure is said to the launcher in one line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to decide on
    order = Order.model_validate_json(Path(sys.argv[1]).read_text())
    channel = Channel(int(os.environ["TRAINWRIGHT_CHANNEL"]))
    rank_number = int(os.environ["RANK"])
    planned = order.request.plan.devices[rank_number]
    torch.set_num_threads(max(1, int(planned.cores or 1)))
    try:
        device = torch.device("cpu")
        if planned.type not in ("cpu", "emulated"):
            if not torch.cuda.is_available() or planned.index >= torch.cuda.device_count():
                raise TrainingFailed(f"{planned.id}: this machine has no such GPU that torch can use")
            device = torch.device("cuda", planned.index)
            torch.cuda.set_device(device)
        collective = connect(order.backend, device)
        rank = Rank(order, collective, channel, device)
        if order.cgroups and order.cgroups[rank_number] is not None:
            cpu_share.join_cgroup(Path(str(order.cgroups[rank_number])))
        channel.send("ready")
        result = {"points": ramp(rank)} if order.mode == "ramp" else Training(rank).run()
        channel.send("done", **result)
        collective.shutdown()
    except TrainwrightError as error:
        traceback.print_exc()
        channel.send("error", error=error.document())
        return 1
    except Exception as error:  # noqa: BLE001 - a boundary: logged whole, and told to the launcher
        traceback.print_exc()
        channel.send("error", error={"kind": "training_failed", "message": f"{type(error).__name__}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Horovod's threads may hang at interpreter exit after a peer has gone
