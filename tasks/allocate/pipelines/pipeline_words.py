"""A pipeline in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.layouts.words import SYNC_WORDS
from trainwright.tasks.runs.artefacts.layout import BatchStatistics, Layout, Pipeline
from trainwright.tasks.units import counted, plain

_MOST_SHOWN = 4
_NORMS: dict[BatchStatistics, str] = {
    "joint": "the joint batch",
    "micro-batch": "each micro-batch",
}


def pipeline_in_words(
    layout: Layout, layers: Sequence[LayerFacts], bubble: float, *, normalises: bool
) -> str:
    """Which device computes what, the micro-batches, and the share of the step that devices wait.

    Such as `2 stages: embed–blocks.3 on gpu-a, blocks.4–head on gpu-b; 8 micro-batches, 1f1b,
    bubble 18 %`. `normalises`: whether a layer has statistics of the batch.
    """
    pipelines = layout.pipelines
    several = len(pipelines) > 1
    texts = [_stages(one) for one in pipelines[: _MOST_SHOWN if several else 1]]
    if several:
        samples = [sum(one.micro_batches) for one in pipelines]
        texts = [f"{text}, {size} samples" for text, size in zip(texts, samples, strict=False)]
        more = len(pipelines) - len(texts)
        texts += [f"{more} more"] if more else []
        texts[0] = f"{len(pipelines)} pipelines: {texts[0]}"
    counts = sorted({len(one.micro_batches) for one in pipelines})
    parts = "1 micro-batch" if counts == [1] else f"{_range(counts)} micro-batches"
    waits = f"bubble {plain(100 * bubble, 2)} %"
    norms = f"; batch norms use statistics of {_NORMS[layout.batch_norm]}" if normalises else ""
    ways = "".join(f"; {text} between the pipelines" for text in _ways(layout, layers))
    return f"{'; '.join(texts)}; {parts}, {layout.schedule}, {waits}{ways}{norms}"


def _ways(layout: Layout, layers: Sequence[LayerFacts]) -> Iterator[str]:
    """What is done with layers that are not summed."""
    for way in dict.fromkeys(layout.sync.values()):
        names = [one.name for one in layers if layout.sync.get(one.name) == way]
        few = len(names) <= _MOST_SHOWN
        shown = ", ".join(names) if few else f"{names[0]} and {len(names) - 1} more"
        yield f"{shown} {SYNC_WORDS[way]}"


def _stages(pipeline: Pipeline) -> str:
    shown = [f"{span(stage.layers)} on {stage.device}" for stage in pipeline.stages]
    return f"{counted(len(shown), 'stage')}: {', '.join(shown)}"


def _range(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def span(units: Sequence[str]) -> str:
    """The first and the last of some units."""
    return units[0] if len(units) == 1 else f"{units[0]}–{units[-1]}"
