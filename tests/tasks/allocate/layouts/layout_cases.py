"""Models and layouts for the tests of layouts."""

from __future__ import annotations

from hypothesis import strategies as st

from trainwright.estimator.curves import Affine
from trainwright.estimator.structure import DenseProduct, LayerFacts
from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline, Stage, Sync


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


def batches_of(layout: Layout) -> dict[str, int]:
    """The samples of a step, by device."""
    parts = [sum(one.micro_batches) for one in layout.pipelines]
    return dict(zip(layout.devices, parts, strict=True))


def holders(layers: list[LayerFacts], layout: Layout) -> dict[str, set[int]]:
    """The ranks that update each layer."""
    everyone = set(range(len(layout.pipelines)))
    return {one.name: everyone for one in layers if one.parameters}


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
