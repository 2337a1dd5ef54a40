"""Models and layouts for the tests of layouts."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from plans import DATA, curve

from trainwright.estimator.curves import Affine, LayerCost
from trainwright.estimator.structure import DenseProduct, LayerFacts
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline, Stage, Sync
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Pool


def dense_layer(name: str, inputs: int, outputs: int, *, bias: bool = True) -> LayerFacts:
    """A linear layer."""
    parameters = {f"{name}.weight": inputs * outputs} | ({f"{name}.bias": outputs} if bias else {})
    return LayerFacts(
        name=name,
        kind="Linear",
        parameters=parameters,
        parameter_bytes=4.0 * sum(parameters.values()),
        dense=DenseProduct(kind="linear", rows_per_sample=1, inputs=inputs, outputs=outputs),
        output_bytes=Affine(fixed=0.0, per_sample=4.0 * outputs),
    )


def convolution(name: str, elements: int) -> LayerFacts:
    """A layer with parameters that is not a plain product."""
    return LayerFacts(
        name=name,
        kind="Conv2d",
        parameters={f"{name}.weight": elements},
        parameter_bytes=4.0 * elements,
    )


LOSS = LayerFacts(name="loss", kind="loss")
ACTIVATION = LayerFacts(name="relu", kind="ReLU")
HEAVY = [
    convolution("conv", 5_000),
    dense_layer("fc6", 4096, 4096),
    dense_layer("fc7", 4096, 10),
    LOSS,
]
"""A model: nearly all parameters are in one dense layer."""
LIGHT = [convolution("conv", 500_000), dense_layer("fc", 16, 10), LOSS]
"""A model: nearly all parameters are in a convolution."""


def plan_and_estimate(
    layers: list[LayerFacts],
    network: str = "200Mbit",
    hosts: int = 2,
    **train: Any,
) -> tuple[Plan, Estimate]:
    """The plan of a model on hosts with one core each, for the least time."""
    pool = Pool.model_validate(
        {
            "name": "p",
            "network": {"bandwidth": network, "latency": "100us"},
            "hosts": [
                {
                    "name": f"host-{number}",
                    "address": f"10.0.0.{number + 1}",
                    "devices": [{"type": "cpu", "cores": 1.0}],
                }
                for number in range(hosts)
            ],
        }
    )
    each = Affine(fixed=0.0, per_sample=1e-4)
    costs = tuple(
        LayerCost(name=one.name, forward=each, input_gradient=each, weight_gradient=each)
        for one in layers
    )
    job = Job.model_validate(
        {
            "name": "j",
            "data": {"uri": "builtin:digits"},
            "objective": {"minimize": "time"},
            "devices": {"min_count": hosts},
            "train": {"global_batch_size": 64, **train},
        }
    )
    estimate = Estimate(
        mode="calibrated",
        gradient_bytes=sum(one.parameter_bytes for one in layers),
        curves=[curve(1.0).model_copy(update={"layers": costs})],
        layers=layers,
    )
    return make_plan(job, pool, estimate, DATA), estimate


def layout_of(
    batches: list[list[int]],
    sync: dict[str, Sync] | None = None,
    rows: dict[str, list[int]] | None = None,
    **fields: object,
) -> Layout:
    """A layout of single-stage pipelines; `rows` gives the number of rows of each device."""
    devices = [f"device-{number}" for number in range(len(batches))]
    cuts = {}
    for layer, counts in (rows or {}).items():
        ends = [sum(counts[: number + 1]) for number in range(len(counts))]
        cuts[layer] = {
            device: (end - count, end)
            for device, count, end in zip(devices, counts, ends, strict=True)
        }
    return Layout(
        pipelines=[
            Pipeline(micro_batches=parts, stages=[Stage(device=device, layers=["model"])])
            for parts, device in zip(batches, devices, strict=True)
        ],
        sync=sync or {},
        rows=cuts,
        **fields,
    )


@st.composite
def models_and_layouts(draw: st.DrawFn) -> tuple[list[LayerFacts], Layout]:
    """A model of up to twelve layers and a permitted layout on up to six devices."""
    layers: list[LayerFacts] = []
    sync: dict[str, Sync] = {}
    rows: dict[str, list[int]] = {}
    ranks = draw(st.integers(1, 6))
    averages = draw(st.booleans())
    for number in range(draw(st.integers(1, 12))):
        name = f"layer{number}"
        kind = draw(st.sampled_from(["dense", "convolution", "plain"]))
        if kind == "plain":
            layers.append(LayerFacts(name=name, kind="ReLU"))
            continue
        if kind == "convolution":
            layers.append(convolution(name, draw(st.integers(1, 3000))))
            allowed: list[Sync] = ["sum"]
        else:
            outputs = draw(st.integers(1, 40))
            layers.append(
                dense_layer(name, draw(st.integers(1, 40)), outputs, bias=draw(st.booleans()))
            )
            allowed = ["sum", "factors", "rows"]
        how = draw(st.sampled_from([*allowed, *(["average"] if averages else [])]))
        sync[name] = how
        if how == "rows":
            cuts = sorted(
                draw(st.lists(st.integers(0, outputs), min_size=ranks - 1, max_size=ranks - 1))
            )
            ends = [*cuts, outputs]
            rows[name] = [end - begin for begin, end in zip([0, *cuts], ends, strict=True)]
    parts = draw(st.integers(1, 3))
    batches = [draw(st.lists(st.integers(0, 9), min_size=1, max_size=parts)) for _ in range(ranks)]
    layout = layout_of(
        batches,
        sync,
        rows,
        chunk_bytes=draw(st.integers(1, 20_000)),
        average_every=1 if averages else None,
    )
    return [*layers, LOSS], layout
