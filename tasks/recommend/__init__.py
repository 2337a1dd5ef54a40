"""Step `recommend`: from data to ranked models, and the source code of the best.

Read `step` first, then `recommender`. `proposals` are the models that the data can have,
`candidate_costs` what they need, `similar_sets/` predicts how they will do, `ranking` orders them,
`reasons` says why, and `trials/` compares them on real rows. In `templates/` each module is one
family of models; `source_code` writes what all generated files have in common.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.tasks.lazy import exports

if TYPE_CHECKING:
    from trainwright.tasks.recommend.step import recommend

__all__ = ["recommend"]

__getattr__ = exports(
    __name__,
    {
        "recommend": "step",
    },
)
