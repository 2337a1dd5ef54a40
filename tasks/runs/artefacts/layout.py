"""A layout: which device holds which part of the model, and how copies are kept equal."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from trainwright.tasks.runs.value import Value

LayoutName = Literal[
    "data-parallel", "late-multiply", "sharded", "hybrid", "pipeline", "averaging", "mixed"
]
LAYOUT_NAMES: tuple[LayoutName, ...] = get_args(LayoutName)
Sync = Literal["sum", "factors", "rows", "average"]
"""How the copies of a layer's parameters are kept equal.

sum: gradients are summed over all. factors: inputs and output gradients are gathered, and every
device multiplies them itself. rows: each device holds some rows of the weight. average: every
device uses its own gradient for some steps, then parameters are averaged.
"""
Outer = Literal["none", "block-momentum", "nesterov"]
"""What an average does: nothing more, block momentum (BMUF), or an outer Nesterov step (DiLoCo)."""
StageSchedule = Literal["gpipe", "1f1b", "zero-bubble"]
"""The order in which stages compute micro-batches (`actions.schedules`)."""
BatchStatistics = Literal["joint", "micro-batch"]
"""Of which samples batch normalisations use statistics: of the step's, or of each micro-batch."""
DATA_PARALLEL: LayoutName = "data-parallel"
CHUNK_BYTES = 4 << 20


class Stage(Value):
    """A part of the model on a device."""

    device: str = Field(description="the device's id in the plan")
    layers: list[str] = Field(
        description="modules, each with all modules inside it; of several stages, the units of the "
        "model (`Structure.units`) that it computes, in order"
    )
    recompute: list[str] = Field(
        default_factory=list,
        description="modules whose forward pass is done again in the backward pass, to save "
        "memory; `blocks.3..blocks.6`: those from one to another together, of which only the "
        "first one's arguments are kept",
    )


class Pipeline(Value):
    """A copy of the model, in one or several stages, and its part of the batch."""

    micro_batches: list[int] = Field(description="samples of each micro-batch of a step")
    stages: list[Stage] = Field(description="in the order of the forward pass")


class Layout(Value):
    """How a step is divided among devices."""

    name: LayoutName = Field(default=DATA_PARALLEL, description="a word for people")
    pipelines: list[Pipeline]
    schedule: StageSchedule = Field(
        default="1f1b",
        description="the order in which stages compute micro-batches: gpipe: all forward passes, "
        "then all backward passes; 1f1b: backward passes as soon as possible; zero-bubble: the "
        "same, and weight gradients while the stage would wait",
    )
    batch_norm: BatchStatistics = Field(
        default="joint",
        description="statistics of batch normalisation in stages: joint: of all pipelines' "
        "micro-batches, one of each; micro-batch: each micro-batch has its own",
    )
    sync: dict[str, Sync] = Field(
        default_factory=dict,
        description="by layer with parameters, where it is not `sum`",
    )
    rows: dict[str, dict[str, tuple[int, int]]] = Field(
        default_factory=dict,
        description="by layer with sync `rows`: the rows of its weight that each device holds, "
        "[first, end)",
    )
    average_every: int | None = Field(
        default=None,
        ge=1,
        description="most steps between averages; None: nothing is averaged; 1 is the same as "
        "summing gradients. If no layer is summed, each micro-batch is a step of its device alone",
    )
    local_batch: int | None = Field(
        default=None,
        ge=1,
        description="samples of a device's own step between averages, so that a faster device does "
        "more steps; None: its whole part of the batch",
    )
    outer: Outer = Field(default="none", description="the step after an average")
    chunk_bytes: int = Field(
        default=CHUNK_BYTES, ge=1, description="gradients are summed in chunks of this size"
    )
    factor_type: Literal["fp32", "bf16"] = Field(
        default="fp32", description="the type in which factors are sent"
    )
    resend_every: int | None = Field(
        default=None,
        ge=1,
        description="devices take the first one's copy of late-multiplied layers every so many "
        "steps, since unlike processors round differently; None: the devices are alike",
    )

    @property
    def devices(self) -> list[str]:
        """The ids of all devices, in the order of pipelines and stages."""
        return [stage.device for pipeline in self.pipelines for stage in pipeline.stages]

    @property
    def has_stages(self) -> bool:
        """Whether some pipeline has several stages."""
        return any(len(pipeline.stages) > 1 for pipeline in self.pipelines)

    @property
    def samples(self) -> dict[str, int]:
        """The samples of a step that each device computes, by id."""
        return {
            stage.device: sum(pipeline.micro_batches)
            for pipeline in self.pipelines
            for stage in pipeline.stages
        }

    @property
    def shares(self) -> dict[str, int]:
        """By device: its part of the batch. Of a pipeline's stages, the first one has it."""
        first = {pipeline.stages[0].device for pipeline in self.pipelines}
        return {one: size if one in first else 0 for one, size in self.samples.items()}

    @property
    def averages(self) -> bool:
        """Whether some layers differ between devices until they are averaged."""
        alone = (self.average_every or 1) > 1 or self.outer != "none"
        return self.average_every is not None and (alone or self.local_batch is not None)

    @property
    def has_transfers(self) -> bool:
        """Whether ranks send each other more than sums."""
        return self.has_stages or bool({"factors", "rows"} & set(self.sync.values()))

    @property
    def alone(self) -> bool:
        """Whether every layer is averaged, so that devices do local steps in between."""
        return self.averages and not self.sync

    @property
    def recomputes(self) -> bool:
        """Whether a device recomputes some modules."""
        return any(stage.recompute for one in self.pipelines for stage in one.stages)

    def recomputed(self, device: str) -> list[str]:
        """The modules that a device recomputes."""
        stages = [stage for pipeline in self.pipelines for stage in pipeline.stages]
        return [name for stage in stages if stage.device == device for name in stage.recompute]

    def how(self, layer: str) -> Sync:
        """How a layer's copies are kept equal.

        Without a word for it: summed; averaged if `average_every` is set and no layer is said to
        be averaged.
        """
        all_average = self.average_every is not None and "average" not in self.sync.values()
        return self.sync.get(layer, "average" if all_average else "sum")


def name_of(syncs: set[Sync], stages: int) -> LayoutName:
    """The word for a layout in which the layers with parameters have these syncs."""
    if "average" in syncs:
        return "averaging" if syncs == {"average"} and stages == 1 else "mixed"
    if stages > 1:
        return "pipeline"
    if syncs <= {"sum"}:
        return DATA_PARALLEL
    if syncs == {"factors"}:
        return "late-multiply"
    return "sharded" if syncs == {"rows"} else "hybrid"
