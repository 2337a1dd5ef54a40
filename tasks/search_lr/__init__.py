"""Step `search_lr`: finds the learning rate by a ramp and short trials.

Start with `step`; `learning_rate` chooses the rate. The ranks' part is in `train.worker`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.tasks.lazy import exports

if TYPE_CHECKING:
    from trainwright.tasks.search_lr.learning_rate import search_learning_rate

__all__ = ["search_learning_rate"]

__getattr__ = exports(
    __name__,
    {
        "search_learning_rate": "learning_rate",
    },
)
