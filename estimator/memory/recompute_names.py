"""Names of what is recomputed together: a module, or modules that run one after another.

`blocks.3` is a module with all that is in it; `blocks.3..blocks.6` are the modules from the first
to the last of these, of which only the first one's arguments are kept. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

_BETWEEN = ".."


def run_of(first: str, last: str) -> str:
    """The name of the modules from one to another, which may be the same."""
    return first if first == last else f"{first}{_BETWEEN}{last}"


def ends_of(name: str) -> tuple[str, str]:
    """The first and the last module of a name."""
    first, _, last = name.partition(_BETWEEN)
    return first, last or first


def is_inside(module: str, outer: str) -> bool:
    """Whether a module is another one, or in it."""
    return module == outer or module.startswith(f"{outer}.")


def covered(names: Collection[str], order: Sequence[str]) -> set[str]:
    """Which layers are recomputed; `order` has all of them in the order in which they run."""
    found: set[str] = set()
    for first, last in map(ends_of, names):
        begins = [place for place, one in enumerate(order) if is_inside(one, first)]
        ends = [place for place, one in enumerate(order) if is_inside(one, last)]
        if first == last:
            found.update(order[place] for place in begins)
        elif begins and ends:
            found.update(order[begins[0] : ends[-1] + 1])
    return found
