"""The plot of a plan: what it shows, and that nothing is clipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import MANY, NOON, TWO, curve, plan

from trainwright.tasks.cli.screens.plans.plan_plot import front, write_plan
from trainwright.tasks.errors import BadInput
from trainwright.tasks.plots.plot_axis import Axis
from trainwright.tasks.plots.plot_shapes import svg
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import Plan

SVG = "{http://www.w3.org/2000/svg}"
PRICED = MANY | {"prices": {"cpu": "0.1/h"}, "currency": "EUR"}
WINDOW = {"hosts": [MANY["hosts"][0] | {"available": "08:00-12:30"}], "prices": {"cpu": "0.1/h"}}


def without_layers() -> Estimate:
    return Estimate(mode="calibrated", gradient_bytes=1e6, curves=[curve(1.0), curve(0.5)])


def drawn(made: Plan) -> ElementTree.Element:
    return ElementTree.fromstring(svg(front(made)))


def words(svg: ElementTree.Element) -> list[str]:
    return [one.text or "" for one in svg.iter(f"{SVG}text")]


def test_all_points_name_their_layout_if_one_has_another() -> None:
    made = plan(MANY)
    assert not any("data-parallel" in one for one in words(drawn(made)))
    other = made.front[0].model_copy(update={"chosen": False, "layout": "sharded"})
    found = words(drawn(made.model_copy(update={"front": [*made.front, other]})))
    assert any("data-parallel" in one for one in found)
    assert any("sharded" in one for one in found)


def test_axes_have_titles_with_units_and_the_legend_names_what_is_drawn() -> None:
    svg = drawn(plan(PRICED, objective={"minimize": "energy"}))
    found = words(svg)
    assert "duration and energy" in found
    assert "duration and cost" in found
    assert any(one.startswith("duration, s") for one in found)
    assert any(one.startswith("energy, J") for one in found)
    assert any(one.startswith("cost, EUR") for one in found)
    assert "the plan" in found
    assert "the lowest value reachable within this time" in found
    assert "a limit" not in found
    assert len(list(svg.iter(f"{SVG}polyline"))) == 2  # the stepped line of each panel


def test_each_point_has_a_number_and_the_list_has_its_devices_and_figures() -> None:
    made = plan(PRICED, objective={"minimize": "energy"})
    found = words(drawn(made))
    shown = len(made.front) + sum("alternative" in one for one in found)
    assert shown >= len(made.front)
    for number, point in enumerate(made.front, start=1):
        (entry,) = (one for one in found if one.startswith(f"{number}: ") and " EUR" in one)
        for kind, count in point.devices.items():
            assert f"{count} x {kind}" in entry
        labels = [one for one in found if one == f"{number}" or one.startswith(f"{number}: ")]
        assert len(labels) >= 3  # in both panels, and in the list


def test_limits_are_lines_or_named_beyond_the_axes() -> None:
    objective = {"minimize": "energy", "deadline": "100s", "budget": 900.0}
    made = plan(WINDOW, now=NOON, objective=objective, train={"epochs": 30})
    svg = drawn(made)
    found = words(svg)
    dashed = [one for one in svg.iter(f"{SVG}line") if one.get("stroke-dasharray")]
    assert len([one for one in dashed if one.get("x1") == one.get("x2")]) == 2
    assert any(one.startswith("deadline ") for one in found)
    assert any(one.startswith("beyond the axes: hosts' windows ") for one in found)
    assert any(one.endswith("budget 900 units") for one in found)
    assert "a limit" in found
    assert "at most (90 %): limits apply to this" in found


@pytest.mark.parametrize(
    ("pool", "job"),
    [
        (PRICED, {"objective": {"minimize": "energy"}}),
        (MANY, {"objective": {"minimize": "time", "deadline": "2m"}}),
        (WINDOW, {"objective": {"minimize": "cost", "budget": 0.002}}),
        (WINDOW, {"objective": {"minimize": "energy", "deadline": "20h", "budget": 9000}}),
        (TWO | {"prices": {"cpu": "0/h"}}, {"objective": {"minimize": "cost"}}),
        (TWO, {"devices": {"max_count": 1, "ids": ["a/cpu-0"]}}),
        (PRICED, {"train": {"batch_bounds": [8, 1000], "noise_scale": 300.0}}),
    ],
)
def test_nothing_is_clipped_and_no_labels_overlap(
    pool: dict[str, Any], job: dict[str, Any]
) -> None:
    svg = drawn(plan(pool, now=NOON, **job))
    width, height = float(svg.get("width", 0)), float(svg.get("height", 0))
    for panel in [svg, *svg.iter(f"{SVG}g")]:
        move = (panel.get("transform") or "translate(0 0)").split("(")[1].split(")")[0].split()
        left, top = float(move[0]), float(move[1])
        boxes = []
        for one in panel.findall(f"{SVG}text"):
            x, y = left + float(one.get("x", 0)), top + float(one.get("y", 0))
            size = float(one.get("font-size", 11))
            long = 0.6 * size * len(one.text or "")
            x -= {"start": 0.0, "middle": long / 2, "end": long}[one.get("text-anchor", "start")]
            if "rotate" in (panel.get("transform") or ""):
                assert (left > size, top - long / 2 > 0, top + long / 2 < height) == (True,) * 3
                continue
            boxes.append((x, y - size + 2, x + long, y + 2, one.text))
            assert (x >= 0, x + long <= width, y - size >= 0, y + 3 <= height) == (True,) * 4, (
                one.text
            )
        for circle in panel.findall(f"{SVG}circle"):
            x, y = left + float(circle.get("cx", 0)), top + float(circle.get("cy", 0))
            assert (6 <= x <= width - 6, 6 <= y <= height - 6) == (True, True)
        for place, one in enumerate(boxes):
            for other in boxes[:place]:
                apart = one[2] <= other[0] or other[2] <= one[0]
                assert apart or one[3] <= other[1] or other[3] <= one[1], (one, other)


def test_the_plot_is_written_as_svg_or_html_and_another_suffix_is_refused(tmp_path: Path) -> None:
    made, unknown = plan(PRICED, objective={"minimize": "energy"}), without_layers()
    for suffix in ("svg", "html"):
        write_plan(made, unknown, tmp_path / f"front.{suffix}")
        write_plan(made, unknown, tmp_path / f"front.{suffix}")  # replaces its own kind
        assert (tmp_path / f"front.{suffix}").read_text().count("<polyline") == 2
    ElementTree.parse(tmp_path / "front.svg")
    with pytest.raises(
        BadInput, match=r"--plot: got .*front\.png; allowed: a file that ends in \.svg or \.html"
    ):
        write_plan(made, unknown, tmp_path / "front.png")
    with pytest.raises(BadInput, match="can't be written"):
        write_plan(made, unknown, tmp_path / "nowhere" / "front.svg")
    (tmp_path / "notes.svg").write_text("<svg/>")
    with pytest.raises(BadInput, match="exists and is not a plot of a plan"):
        write_plan(made, unknown, tmp_path / "notes.svg")


def test_without_the_layers_costs_the_plot_has_no_timeline_and_the_reason_is_given(
    tmp_path: Path,
) -> None:
    made = plan(TWO)
    missing = write_plan(made, without_layers(), tmp_path / "plan.svg")
    assert missing is not None
    assert "the estimate does not say what each layer costs" in missing
    assert "one step, rank by rank" not in (tmp_path / "plan.svg").read_text()


@given(st.lists(st.floats(0, 1e12).filter(lambda one: one == 0 or one > 1e-12), min_size=1))
def test_an_axis_contains_its_values_and_has_ticks_without_exponents(values: list[float]) -> None:
    axis = Axis.over(values, 0.0, 100.0)
    for value in values:
        assert -1e-6 <= axis.at(value) <= 100 + 1e-6
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 26
    for value, label in ticks:
        assert -1e-6 <= axis.at(value) <= 100 + 1e-6
        assert float(label.replace(",", "")) == pytest.approx(value)
