"""Embeds bokeh charts into a page so that they follow the browser's theme.

A chart is drawn on a canvas, which no CSS reaches. So a script puts the dark colours into its JSON,
and draws it again when the theme changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from trainwright.tasks.plots.colours import DARK

_DRAW = """
const theme = matchMedia("(prefers-color-scheme: dark)");
const dark = JSON.parse(document.getElementById("dark").textContent);
let drawn = [];
async function draw() {
  const before = drawn;
  drawn = JSON.parse(document.getElementById("charts").textContent,
    (_, value) => theme.matches && Object.hasOwn(dark, value) ? dark[value] : value,
  ).map((chart) => Bokeh.embed.embed_item(chart));
  for (const views of await Promise.all(before)) views.clear();
}
theme.addEventListener("change", draw);
draw();
"""


def library() -> str:
    """What the page's head needs to draw charts: bokeh itself."""
    from bokeh.resources import Resources

    return str(Resources(mode="inline", components=["bokeh"]).render())


def places(charts: Mapping[str, Any]) -> dict[str, str]:
    """The element of each chart, by its name."""
    return {
        name: f'<div class="wide chart" role="figure" id="chart-{name}" '
        f'aria-label="{escape(chart.title.text)}"></div>'
        for name, chart in charts.items()
    }


def script(charts: Mapping[str, Any]) -> str:
    """The script that draws the charts into their places, which are before it; empty if none."""
    from bokeh.embed import json_item

    if not charts:
        return ""
    items = [json_item(chart, f"chart-{name}") for name, chart in charts.items()]
    return f"{_data('charts', items)}{_data('dark', DARK)}<script>{_DRAW}</script>"


def _data(identifier: str, value: Any) -> str:
    content = json.dumps(value).replace("<", "\\u003c")  # nothing in it ends the script
    return f'<script type="application/json" id="{identifier}">{content}</script>'
