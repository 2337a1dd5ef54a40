"""In words: a stage that does not fit into its device's memory. Loads no torch."""

from __future__ import annotations

from trainwright.tasks.runs.artefacts.layout import Layout


def stage_shortage(layout: Layout, device: str) -> str:
    """That a device's stage does not fit into memory, and what takes less; empty: it has none."""
    if not layout.has_stages:
        return ""
    for pipeline in layout.pipelines:
        for number, stage in enumerate(pipeline.stages):
            if stage.device == device:
                units, most = stage.layers, max(pipeline.micro_batches)
                what = f"{units[0]} to {units[-1]}" if units else "the whole model"
                return (
                    f"stage {number + 1} of {len(pipeline.stages)} on {device}, {what}, "
                    f"does not fit into memory with micro-batches of {most}; less take: "
                    + "; ".join(_what_takes_less(layout, device, pipeline.micro_batches))
                )
    return ""


def _what_takes_less(layout: Layout, device: str, sizes: list[int]) -> list[str]:
    ways, most = [], max(sizes)
    if layout.schedule == "gpipe":  # with it, all micro-batches are kept at once
        ways.append("train.layout.schedule: 1f1b")
    elif most > 1:
        ways.append(f"train.layout.micro_batches: {2 * len(sizes)}, of {-(-most // 2)} samples")
    ways.append("a smaller train.global_batch_size")
    if not layout.recomputed(device):
        ways.append("train.layout.recompute: all")
    return ways
