"""The colours of pages and plots, by the words of the service's page (`page.css`): light and dark.

Plots are drawn in the light ones. A page with a dark theme replaces these: in SVG by `STYLE`, in a
chart's JSON by `DARK`.
"""

from __future__ import annotations

from typing import NamedTuple


class Shades(NamedTuple):
    """A colour on a light page and on a dark one."""

    light: str
    dark: str


COLOURS = {
    "back": Shades("#f6f7f9", "#14171c"),
    "card": Shades("#ffffff", "#1c2027"),
    "line": Shades("#e1e4e9", "#2e343e"),
    "text": Shades("#1b1f26", "#e4e7ec"),
    "muted": Shades("#5b6472", "#99a3b2"),
    "accent": Shades("#0b62b8", "#6cb2f5"),
    "good": Shades("#1a7a3e", "#5fce8a"),
    "bad": Shades("#b3261e", "#ff8f87"),
    "hue-0": Shades("#0b62b8", "#6cb2f5"),
    "hue-1": Shades("#c2571a", "#f59f66"),
    "hue-2": Shades("#1a7a5e", "#58cba4"),
    "hue-3": Shades("#8a3f9c", "#d08fe0"),
    "hue-4": Shades("#8a6d00", "#dcc04c"),
    "hue-5": Shades("#a82f5b", "#f286aa"),
    "hue-6": Shades("#4a5568", "#aab4c4"),
    "hue-7": Shades("#2b7a99", "#66c5e6"),
}
BACK, CARD, LINE, TEXT, MUTED = (
    COLOURS[word].light for word in ("back", "card", "line", "text", "muted")
)
HUES = tuple(shades.light for word, shades in COLOURS.items() if word.startswith("hue-"))
BLUE, ORANGE, GREEN, PURPLE, OCHRE, PINK, GREY, _ = HUES
DARK = {shades.light: shades.dark for shades in COLOURS.values()}
"""Of each colour on a light page, the one on a dark page."""


def _variables(dark: bool) -> str:
    return " ".join(f"--{word}: {shades[dark]};" for word, shades in COLOURS.items())


def _drawn() -> str:
    """Rules that give what is drawn in a light colour the variable's."""
    return "\n".join(
        f'svg [{attribute}="{shades.light}"] {{ {attribute}: var(--{word}); }}'
        for word, shades in COLOURS.items()
        for attribute in ("fill", "stroke")
    )


STYLE = f"""
:root {{ color-scheme: light dark; {_variables(dark=False)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(dark=True)} }} }}
svg {{ fill: var(--text); }}
{_drawn()}
"""
"""CSS: the words as variables, in the browser's theme; drawings follow them."""
