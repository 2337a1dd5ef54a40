"""plan.json: devices, their shares and what they are predicted to need. Plans of several jobs."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from trainwright.estimator.curves import Affine, Interval, LayerCost, Mode
from trainwright.estimator.predict.communication import Link
from trainwright.estimator.predict.energy import PowerDraw
from trainwright.estimator.structure import LayerFacts, Unit
from trainwright.tasks.runs.artefacts.artefact import Artefact
from trainwright.tasks.runs.artefacts.expected_wait import QueueWait
from trainwright.tasks.runs.artefacts.layout import DATA_PARALLEL, Layout, LayoutName, Sync
from trainwright.tasks.runs.artefacts.step_kinds import StepByKind
from trainwright.tasks.runs.value import Value
from trainwright.tasks.spec.pool import Device


class StepShares(Value):
    """What a device does during a step, as shares of the predicted step time; together 1."""

    compute: float = Field(description="for its own work")
    wait: float = Field(
        description="for slower devices; of a stage: for other stages, messages and sums"
    )
    communicate: float = Field(description="for sums over devices, after the slowest has computed")


class PlannedDevice(Device):
    """A device of the plan, with its share of each step."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    batch_size: int = Field(description="its samples of a step")
    cpu_threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads with which it computes; None: one for each whole core",
    )
    most_batch_size: int | None = Field(
        default=None,
        description="samples that its memory can hold, beside the other ranks; None: not known",
    )
    step_time_s: Interval = Field(description="its own work, without waiting for other ranks")
    loop_s: float | None = Field(
        default=None,
        description="the part of the step time that training adds to the model's own step; "
        "None: not included",
    )
    peak_memory_bytes: float = Field(description="bound on what the rank needs")
    memory_bytes: Affine | None = Field(
        default=None, description="the rank's memory as a function of its batch size, if known"
    )
    power: PowerDraw | None = Field(default=None, description="power that the prediction assumes")
    mode: Mode | None = Field(default=None, description="the prediction's mode")
    step_shares: StepShares | None = None
    price_per_hour: float | None = Field(
        default=None, description="in the pool's currency; None: not known"
    )
    available: str | None = Field(
        default=None, description="its host's daily window, UTC; None: always"
    )

    @property
    def threads(self) -> int:
        """The number of CPU threads with which it computes."""
        return self.cpu_threads or super().threads

    def largest_batch(self, limit_bytes: float) -> int | None:
        """The largest batch within a memory limit; None without a rising memory curve."""
        line = self.memory_bytes
        if line is None or line.per_sample <= 0:
            return None
        return max(0, int((limit_bytes - line.fixed) // line.per_sample))


class Prediction(Value):
    """What a plan is predicted to need."""

    step_time_s: Interval
    duration_s: Interval
    energy_j: Interval | None
    cost: Interval | None
    rent: Interval | None = Field(default=None, description="the part of cost for the devices")
    energy_cost: Interval | None = Field(default=None, description="the part of cost for energy")
    by_kind: list[StepByKind] = Field(
        default_factory=list,
        description="by device: medians of a simulated step. Empty: the layers are not known, or "
        "the plan has more than 64 devices",
    )


class MachineLinks(Value):
    """The links of a machine: to other machines, and between its own ranks."""

    between: Link
    inside: Link = Field(description="through the machine's memory")
    sums: Link | None = Field(
        default=None,
        description="for sums of gradients among its devices; None: through the machine's memory",
    )
    source: str = Field(default="", description="what the links inside it are, and where from")


class NotExceeded(Value):
    """Upper bounds at the job's confidence; the deadline and budget apply to these."""

    confidence: float = Field(description="probability with which the values are not exceeded")
    duration_s: float = Field(description="of the training")
    cost: float | None = Field(description="in the pool's currency")


class LayerGroup(Value):
    """Layers that the layout treats alike, for one reason."""

    layers: list[str] = Field(description="names of the layers")
    kinds: list[str] = Field(description="the modules' classes")
    sync: Sync = Field(description="how their copies are kept equal")
    sent_bytes: float = Field(description="that a device sends for them in a step, at most")
    why: str = Field(description="the reason, with the bytes of the other ways if these differ")


class Alternative(Value):
    """A configuration that was not chosen, with the reason."""

    layout: LayoutName = Field(default=DATA_PARALLEL, description="how it divides a step")
    layout_in_words: str = Field(
        default="", description="the layout, for people, if it is another than the plan's"
    )
    devices: dict[str, int] = Field(description="number of devices by kind")
    global_batch_size: int = Field(description="samples of a step")
    accumulation: int = Field(default=1, description="micro-batches of a step")
    predicted: Prediction | None = None
    feasible: bool = Field(description="whether it keeps all limits")
    reason: str = Field(description="why it lost")


class FrontPoint(Value):
    """A Pareto-optimal configuration: none is better in time, energy and cost together."""

    time: float = Field(description="median duration, s")
    energy: float | None = Field(description="J")
    cost: float | None = Field(description="in the pool's currency")
    devices: dict[str, int] = Field(description="number of devices by kind")
    global_batch_size: int = Field(description="samples of a step")
    accumulation: int = Field(default=1, description="micro-batches of a step")
    layout: LayoutName = Field(default=DATA_PARALLEL, description="how it divides a step")
    feasible: bool = Field(description="within the job's limits at its confidence")
    chosen: bool = Field(default=False, description="the plan itself")


class SearchedChoices(Value):
    """The choices that a plan was compared with: all combinations of these, within the limits.

    For each, the global batch is divided among the devices in whole samples.
    """

    devices: int = Field(description="devices that the job may use")
    device_sets: int | None = Field(
        description="choices of devices; devices that do not differ, apart from their names, count "
        "as one; None: more than 10^15"
    )
    global_batch_sizes: list[int] = Field(description="that were compared")
    most_micro_batches: int = Field(
        description="of data parallel plans: per step, at the plan's global batch; more would be "
        "slower"
    )
    layouts: list[str] = Field(description="ways to divide a step among devices")
    without_price: dict[str, int] = Field(
        default_factory=dict,
        description="devices by kind that were left out, as the plan's cost matters and the pool "
        "has no price for them",
    )


class HeldDevice(Value):
    """A device that another run holds."""

    id: str = Field(description="of the device")
    holder: str = Field(description="process that has it")
    run: str = Field(description="for which it has it")
    until: str = Field(description="end of the lease unless it is renewed, ISO 8601, UTC")


_HELD: Any = Field(
    default=None,
    description="devices of the pool that were held when the plan was made; the plan assumes that "
    "they are free; None: not checked",
)


class Plan(Artefact):
    """plan.json. Objectives are compared by medians; limits hold at the job's confidence."""

    FILE: ClassVar[str] = "plan.json"
    feasible: bool = Field(description="whether a configuration keeps all limits")
    objective: Literal["energy", "cost", "time"] = Field(description="what is least")
    devices: list[PlannedDevice]
    global_batch_size: int = Field(description="samples of a step, over all devices")
    steps_per_epoch: int = Field(description="steps in a pass over the training rows")
    epochs: int = Field(description="passes over the training rows")
    strategy: dict[str, Any] = Field(
        description="name of the strategy that made it, and its choices"
    )
    links: dict[str, MachineLinks] = Field(
        default_factory=dict, description="that the prediction assumes, by machine of the devices"
    )
    layout: Layout | None = Field(
        default=None, description="which device holds which part of the model; None: data parallel"
    )
    layout_in_words: str = Field(default="", description="the layout, for people")
    layout_rule: str | None = Field(default=None, description="why this layout was chosen")
    by_layer: list[LayerGroup] = Field(
        default_factory=list,
        description="how copies of each layer are kept equal, and why; empty: alike for all",
    )
    layers: list[LayerFacts] = Field(
        default_factory=list,
        description="the model's layers, in the order of the forward pass; of data parallel plans "
        "only their names and parameters; empty: one device, or not known",
    )
    units: list[Unit] = Field(
        default_factory=list,
        description="the parts between which the model is cut, if the layout has stages",
    )
    emulated_layers: list[LayerCost] = Field(
        default_factory=list,
        description="seconds of each layer for a sample on an emulated device of speed 1; empty: "
        "not known, or no device is emulated",
    )
    predicted: Prediction | None
    not_exceeded: NotExceeded | None = Field(
        default=None, description="the values to which the limits apply"
    )
    deadline_s: float | None = Field(
        description="from the lease, or the request to a cluster, to the end of training; "
        "None: none"
    )
    queue_wait: QueueWait | None = Field(
        default=None,
        description="before the training; None: its hosts wait in no cluster's queue, or it was "
        "not asked",
    )
    budget: float | None = Field(default=None, description="in the pool's currency")
    binding: str | None = Field(default=None, description="if infeasible: the limit that binds")
    nearest: dict[str, float] = Field(
        default_factory=dict, description="if infeasible: the nearest feasible deadline_s, budget"
    )
    alternatives: list[Alternative] = Field(default_factory=list)
    front: list[FrontPoint] = Field(
        default_factory=list,
        description="Pareto front of time, energy and cost at this global batch, fastest first",
    )
    batches: list[FrontPoint] = Field(
        default_factory=list,
        description="the best configuration of each global batch that was considered",
    )
    accumulation: int = Field(default=1, description="micro-batches per step of every rank")
    batch_rule: str | None = Field(default=None, description="why this global batch was chosen")
    search: Literal["exact", "bounded", "greedy"] = Field(
        default="exact",
        description="exact: none of the plans that `gap` is about is better; bounded: none is "
        "better by more than `gap`",
    )
    gap: float = Field(
        default=0.0,
        description="upper bound on how much better another plan of this global batch can be, "
        "relative. For a data parallel plan: another data parallel one, on any devices; for any "
        "other: every layout that the job permits, on any devices; 1: not known",
    )
    layouts_gap: float | None = Field(
        default=None,
        description="upper bound on how much better any layout that the job permits can be, on "
        "any devices, at this global batch, relative; None: not known",
    )
    searched: SearchedChoices | None = None
    currency: str | None = Field(default=None, description="of prices, cost and budget")
    window_s: float | None = Field(
        default=None,
        description="time left in the daily windows of all its hosts when it was made; None: "
        "unlimited",
    )
    held: list[HeldDevice] | None = _HELD
    solve_time_s: float = Field(
        description="time until the plan was found, without alternatives and front"
    )

    @property
    def shares(self) -> list[int]:
        """Each device's part of the global batch. Of a pipeline's stages, the first one has it."""
        own = {} if self.layout is None else self.layout.shares
        return [own.get(device.id, device.batch_size) for device in self.devices]

    def resources(self, run: str) -> list[str]:
        """The ledger's names of the plan's devices, for a run."""
        return [device.resource_of(run) for device in self.devices]


class ScheduledJob(Value):
    """A job of a joint plan."""

    job: str
    starts_s: float = Field(description="after now")
    ends_s: float = Field(description="after now, not exceeded at the job's confidence")
    deadline_s: float | None
    slips: bool = Field(description="whether it misses its deadline in this plan")
    devices: list[PlannedDevice]
    global_batch_size: int
    accumulation: int = Field(default=1, description="micro-batches per step of every rank")
    predicted: Prediction


class JointPlan(Value):
    """Several jobs on one pool: when each runs, and on which devices."""

    feasible: bool = Field(description="whether every job meets its deadline")
    objective: Literal["energy"] = "energy"
    jobs: list[ScheduledJob] = Field(description="in order of start")
    energy_j: float = Field(description="median, all jobs together")
    slips: list[str] = Field(default_factory=list, description="jobs that miss their deadline")
    late_alone: dict[str, str] = Field(
        default_factory=dict,
        description="those that would miss it even with all devices to themselves, with reasons",
    )
    held: list[HeldDevice] | None = _HELD
    search: Literal["exact", "bounded"] = Field(
        description="exact: all choices of devices and all orders were considered; bounded: not "
        "all. Does not apply to the delays of late jobs, which are found in steps"
    )
    gap: float | None = Field(
        default=0.0,
        description="bounded: upper bound on the share of energy that another plan can save; None "
        "if not all choices of devices were considered",
    )
    solve_time_s: float
