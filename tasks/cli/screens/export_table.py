"""An export's figures for a person."""

from __future__ import annotations

from typing import Any

from trainwright.tasks import units
from trainwright.tasks.runs.artefacts.export_report import EXPORT_FOLDER

_DOING_WIDTH = 52


def progress_line(event: dict[str, Any]) -> str | None:
    """The line of an event: a tool that begins, or work that has ended, with its seconds."""
    doing = event["doing"]
    if "took_s" in event:
        return f"{doing:<{_DOING_WIDTH}} {event['took_s']:>6.1f} s"
    return f"{doing:<{_DOING_WIDTH}} begins" if "tool" in event else None


def export_facts(report: dict[str, Any], copy: str | None) -> list[tuple[str, str]]:
    """The lines of a report's document. `copy`: the folder of a copy, if there is one."""
    metrics, size, times = report["metrics"], report["size_bytes"], report["latency_s"]
    found = [
        ("run", report["run"]),
        ("kind", report["kind"]),
        (
            report["metric"],
            f"{units.metric(metrics['exported'])}, trained {units.metric(metrics['trained'])}",
        ),
        _likeness(report),
    ]
    if size is not None:
        found.append(("size", _size(size["exported"], size["float"])))
    if times is not None:
        other = "torch" if report["kind"] == "onnx" else "float ONNX"
        found.append(
            (
                f"batch of {times['batch_size']}",
                f"{units.seconds(times['exported']['median'])}, "
                f"by {other} {units.seconds(times['float']['median'])}",
            )
        )
    if report["kept_float"]:
        offer = "" if report["fine_tuned"] else "; --fine-tune may need fewer"
        found.append(("kept in float", ", ".join(report["kept_float"]) + offer))
    found += _of_circuits(report)
    found += [("note", one) for one in report["notes"]]
    found.append(("folder", copy or f"{report['run']}/{EXPORT_FOLDER}{report['kind']}"))
    return found


def _size(exported: int, other: int) -> str:
    """The size of an exported model, and of the float one beside it if that is another."""
    if exported == other:
        return units.size(exported)
    return f"{units.size(exported)}, float {units.size(other)} ({other / exported:.2f} × smaller)"


def _likeness(report: dict[str, Any]) -> tuple[str, str]:
    """How alike exported and trained model decide."""
    off, rows = report["differences"], f"{report['rows']:,} validation rows"
    if off is None:
        return (
            "agreement",
            f"{100 * report['agreement']:.2f} % of {rows}; outputs differ by at most "
            f"{report['max_error']:.1e}",
        )
    return (
        "differences",
        f"median {100 * off['median']:.2g} %, largest {100 * off['largest']:.2g} % of the target's "
        f"standard deviation, on {rows}",
    )


def _of_circuits(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Simulation, cells, clock and energy of circuits; nothing for other kinds."""
    if report["vectors"] is None:
        return []
    found = [
        ("simulated", f"{report['vectors']:,} vectors, {report['mismatches']:,} mismatches"),
        *(
            (
                one["style"],
                f"{one['device']}: {one['lookup_tables']:,} lookup tables (predicted "
                f"{one['predicted']:,}), {_clock(one)}, "
                f"{one['latency_cycles']:,} cycles, {one['energy_j']:.2g} J an inference",
            )
            for one in report["cells"]
        ),
    ]
    if report["cells"]:
        least = min(report["cells"], key=lambda one: float(one["energy_j"]))
        found.append(
            (
                "least energy",
                f"{least['energy_j']:.2g} J an inference, estimated, by the {least['style']} "
                f"circuit on {least['device']}",
            )
        )
    return found


def _clock(cells: dict[str, Any]) -> str:
    clock = cells["fmax_mhz"]
    return cells["note"] or "no clock" if clock is None else f"{clock:g} MHz"
