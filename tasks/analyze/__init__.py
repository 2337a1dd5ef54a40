"""Step `analyze`: compares a run with earlier ones, and writes the report.

`history` compares, `report` makes the HTML.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.tasks.lazy import exports

if TYPE_CHECKING:
    from trainwright.tasks.analyze.history import analyze

__all__ = ["analyze"]

__getattr__ = exports(
    __name__,
    {
        "analyze": "history",
    },
)
