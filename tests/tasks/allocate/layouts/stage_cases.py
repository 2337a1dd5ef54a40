"""Models cut into units, and layouts with stages, for the tests of pipelines."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st
from layout_cases import LOSS, convolution, dense_layer

from trainwright.estimator.curves import Affine
from trainwright.estimator.structure import LayerFacts, Unit
from trainwright.tasks.allocate.actions.schedules import passes_of
from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline, Stage, StageSchedule, Sync

SCHEDULES: tuple[StageSchedule, ...] = ("gpipe", "1f1b", "zero-bubble")


def unit_of(name: str, layers: list[str], crossing: float = 100.0, **fields: object) -> Unit:
    """A unit after which `crossing` bytes for each sample are alive."""
    return Unit(
        name=name,
        modules=layers,
        layers=layers,
        crossing_bytes=Affine(fixed=0.0, per_sample=crossing),
        **fields,
    )


def chain(
    count: int, elements: int = 1000, crossing: float = 100.0
) -> tuple[list[LayerFacts], list[Unit]]:
    """A model of alike layers, each a unit."""
    names = [f"layer{number}" for number in range(count)]
    layers = [convolution(name, elements) for name in names]
    return [*layers, LOSS], [unit_of(name, [name], crossing) for name in names]


def pipeline(
    first_device: int, parts: list[int], cuts: list[int], units: list[Unit], **fields: list[str]
) -> Pipeline:
    """A pipeline of stages on devices with consecutive numbers, cut before these units."""
    ends = [0, *cuts, len(units)]
    return Pipeline(
        micro_batches=parts,
        stages=[
            Stage(
                device=f"device-{first_device + number}",
                layers=[one.name for one in units[begin:end]],
                **fields,
            )
            for number, (begin, end) in enumerate(itertools.pairwise(ends))
        ],
    )


def stage_layout(
    *pipelines: tuple[list[int], list[int]], units: list[Unit], **fields: object
) -> Layout:
    """Pipelines with these micro-batches and cuts."""
    found: list[Pipeline] = []
    for parts, cuts in pipelines:
        first = sum(len(one.stages) for one in found)
        found.append(pipeline(first, parts, cuts, units))
    return Layout(name="pipeline", pipelines=found, **fields)


def holders(layers: list[LayerFacts], layout: Layout, units: list[Unit]) -> dict[str, set[int]]:
    """The ranks that update each layer: those whose stage computes it or uses its parameters."""
    found: dict[str, set[int]] = {one.name: set() for one in layers if one.parameters}
    stages = [stage for one in layout.pipelines for stage in one.stages]
    for rank, stage in enumerate(stages):
        for unit in units:
            if unit.name in stage.layers:
                for layer in layers:
                    uses = layer.name in unit.layers or set(unit.tied) & set(layer.parameters)
                    if layer.parameters and uses:
                        found[layer.name].add(rank)
    return found


@st.composite
def staged_models(draw: st.DrawFn) -> tuple[list[LayerFacts], list[Unit], Layout]:
    """A model of up to ten units, and a permitted layout with stages on up to nine devices."""
    layers: list[LayerFacts] = []
    units: list[Unit] = []
    dense: list[str] = []
    outputs: dict[str, int] = {}
    for number in range(draw(st.integers(2, 10))):
        own = []
        for place in range(draw(st.integers(0, 2))):
            name = f"unit{number}.{place}"
            kind = draw(st.sampled_from(["dense", "convolution", "plain"]))
            if kind == "plain":
                own.append(LayerFacts(name=name, kind="ReLU"))
            elif kind == "convolution":
                own.append(convolution(name, draw(st.integers(1, 3000))))
            else:
                outputs[name] = draw(st.integers(1, 40))
                own.append(dense_layer(name, draw(st.integers(1, 40)), outputs[name]))
                dense.append(name)
        earlier = [name for one in layers for name in one.parameters if one.kind == "Conv2d"]
        tied = draw(st.lists(st.sampled_from(earlier), max_size=1)) if earlier else []
        names = [one.name for one in own]
        layers += own
        units.append(unit_of(f"unit{number}", names, draw(st.floats(0, 1e5)), tied=tied))
    pipelines: list[Pipeline] = []
    alike = draw(st.booleans())
    parts, cuts = draw(_parts()), draw(_cuts(len(units), least=1))
    for _ in range(draw(st.integers(1, 3))):
        first = sum(len(one.stages) for one in pipelines)
        pipelines.append(pipeline(first, parts, cuts, units))
        if not alike:
            parts, cuts = draw(_parts()), draw(_cuts(len(units), least=0))
    layout = Layout(
        name="pipeline",
        pipelines=pipelines,
        schedule=draw(st.sampled_from(SCHEDULES)),
        chunk_bytes=draw(st.integers(1, 20_000)),
    )
    return [*layers, LOSS], units, _with_syncs(draw, layout, units, dense, outputs)


def _parts() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 9), min_size=1, max_size=6)


def _cuts(units: int, least: int) -> st.SearchStrategy[list[int]]:
    places = st.lists(st.integers(1, units - 1), min_size=least, max_size=3, unique=True)
    return places.map(sorted)


def _with_syncs(
    draw: st.DrawFn, layout: Layout, units: list[Unit], dense: list[str], outputs: dict[str, int]
) -> Layout:
    """Some dense layers late-multiplied or sharded, as far as the layout permits."""
    sync: dict[str, Sync] = {}
    rows: dict[str, dict[str, tuple[int, int]]] = {}
    if len(layout.pipelines) == 1:
        return layout
    for name in dense:
        how = draw(st.sampled_from(["sum", "factors", "rows"]))
        if how == "rows":
            held = _held(name, layout, units)
            if len({order for _, order in held}) > 1:
                continue
            ends = sorted(
                draw(
                    st.lists(
                        st.integers(0, outputs[name]),
                        min_size=len(held) - 1,
                        max_size=len(held) - 1,
                    )
                )
            )
            pairs = itertools.pairwise([0, *ends, outputs[name]])
            rows[name] = dict(zip([device for device, _ in held], pairs, strict=True))
        sync[name] = how
    return layout.model_copy(update={"sync": sync, "rows": rows})


def _held(name: str, layout: Layout, units: list[Unit]) -> list[tuple[str, str]]:
    """The devices that hold a layer, each with the order in which it computes micro-batches."""
    unit = next(one.name for one in units if name in one.layers)
    return [
        (
            stage.device,
            repr(passes_of(layout.schedule, len(one.stages), number, len(one.micro_batches))),
        )
        for one in layout.pipelines
        for number, stage in enumerate(one.stages)
        if unit in stage.layers
    ]
