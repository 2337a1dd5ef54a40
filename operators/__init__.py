"""trainwright's Airflow operators: each step of the chain, usable alone in any DAG.

`base` is every operator's base. `provider` has the connection forms, `hooks` what they set;
`triggers`, `links`, `decorators`, `plugin` and `service` are the rest of what Airflow sees.

    from trainwright.operators import ValidateOperator, TrainOperator

An operator's module is imported when its name is first used, and none loads torch, pandas or
similar: the work happens in `trainwright.tasks`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainwright.operators.allocate import AllocateOperator, ReleaseOperator
    from trainwright.operators.analyze import AnalyzeOperator
    from trainwright.operators.calibrate import CalibrateOperator
    from trainwright.operators.estimate import EstimateOperator
    from trainwright.operators.export import ExportOperator
    from trainwright.operators.extract import ExtractOperator
    from trainwright.operators.predict import PredictOperator
    from trainwright.operators.promote import ApprovePromotionOperator, PromoteOperator
    from trainwright.operators.recommend import RecommendOperator
    from trainwright.operators.search_lr import SearchLearningRateOperator
    from trainwright.operators.store import StoreOperator
    from trainwright.operators.train import TrainOperator
    from trainwright.operators.validate import ValidateOperator

_MODULES = {
    "AllocateOperator": "allocate",
    "AnalyzeOperator": "analyze",
    "ApprovePromotionOperator": "promote",
    "CalibrateOperator": "calibrate",
    "EstimateOperator": "estimate",
    "ExportOperator": "export",
    "ExtractOperator": "extract",
    "PredictOperator": "predict",
    "PromoteOperator": "promote",
    "RecommendOperator": "recommend",
    "ReleaseOperator": "allocate",
    "SearchLearningRateOperator": "search_lr",
    "StoreOperator": "store",
    "TrainOperator": "train",
    "ValidateOperator": "validate",
}

__all__ = [
    "AllocateOperator",
    "AnalyzeOperator",
    "ApprovePromotionOperator",
    "CalibrateOperator",
    "EstimateOperator",
    "ExportOperator",
    "ExtractOperator",
    "PredictOperator",
    "PromoteOperator",
    "RecommendOperator",
    "ReleaseOperator",
    "SearchLearningRateOperator",
    "StoreOperator",
    "TrainOperator",
    "ValidateOperator",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
