"""The report and the service's page have the same colours in both themes."""

from __future__ import annotations

import re
from pathlib import Path

import trainwright.tasks.service.records as records
from trainwright.tasks.plots.colours import COLOURS


def test_the_colours_are_those_of_the_services_page() -> None:
    style = (Path(records.__file__).parent / "page" / "page.css").read_text()
    page = dict(re.findall(r"--([a-z0-9-]+): light-dark\((#\w{6}, #\w{6})\)", style))
    assert {word: ", ".join(shades) for word, shades in COLOURS.items()}.items() <= page.items()


def test_a_light_colour_has_one_dark_twin() -> None:
    twins = {shades.light: shades for shades in COLOURS.values()}
    assert all(twins[shades.light] == shades for shades in COLOURS.values())
