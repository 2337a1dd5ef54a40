"""DLinear: a linear map of the history's trend, and one of the rest (A. Zeng et al., 2022)."""

from __future__ import annotations

from trainwright.tasks.recommend.templates.forecasts.forecast_parts import (
    ForecastNetwork,
    forecast_template,
)

_NETWORK = ForecastNetwork(
    arguments=", average: int",
    layers="""
        self.average = min(average, (HISTORY - 1) // 2 * 2 + 1)
        self.trend = nn.Linear(HISTORY, HORIZON)
        self.rest = nn.Linear(HISTORY, HORIZON)
""",
    methods='''
    def forecast(self, history: Tensor) -> Tensor:
        """A linear map of the history's moving average, and one of the rest."""
        side = self.average // 2
        padded = functional.pad(history.unsqueeze(1), (side, side), mode="replicate")
        trend = functional.avg_pool1d(padded, self.average, 1).squeeze(1)
        found: Tensor = self.trend(trend) + self.rest(history - trend)
        return found

    def start(self, history: Tensor, targets: Tensor) -> None:
        """Both maps start as one, by ridge regression."""
        gram = history.T @ history + len(history) / 1000 * torch.eye(HISTORY).to(history)
        found = torch.linalg.solve(gram, history.T @ targets).T
        for part in (self.trend, self.rest):
            part.weight.copy_(found)
            part.bias.zero_()
''',
    build='''
def build_model(hidden: int = $hidden, average: int = $average) -> Model:
    """A model with `hidden` units for effects, and a moving average over `average` steps."""
    return Model(hidden, average)
''',
)

DLINEAR = forecast_template(
    "dlinear",
    "DLinear",
    _NETWORK,
    sizes={
        "small": {"hidden": 16, "average": 25},
        "medium": {"hidden": 32, "average": 25},
        "large": {"hidden": 64, "average": 25},
    },
)
