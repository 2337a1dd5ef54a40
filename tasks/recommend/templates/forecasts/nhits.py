"""N-HiTS: blocks that each see and forecast at a resolution of its own (C. Challu et al., 2023)."""

from __future__ import annotations

from trainwright.tasks.recommend.templates.forecasts.forecast_parts import (
    ForecastNetwork,
    forecast_template,
)

_NETWORK = ForecastNetwork(
    arguments=", width: int",
    before='''
class Block(nn.Module):
    """Sees the mean of every `pool` steps; explains and forecasts as many points."""

    def __init__(self, pool: int, width: int) -> None:
        super().__init__()
        self.pool = pool
        self.layers = layers(-(-HISTORY // pool), width, -(-(HISTORY + HORIZON) // pool))

    def forward(self, history: Tensor) -> Tensor:
        """Points joined by lines, (rows, HISTORY + HORIZON)."""
        means = functional.avg_pool1d(history.unsqueeze(1), self.pool, ceil_mode=True)
        points = self.layers(means.squeeze(1)).unsqueeze(1)
        return functional.interpolate(points, HISTORY + HORIZON, mode="linear").squeeze(1)
''',
    layers="""
        self.line = nn.Linear(HISTORY, HORIZON)
        self.blocks = nn.ModuleList(Block(pool, width) for pool in (8, 4, 1))
""",
    methods='''
    def forecast(self, history: Tensor) -> Tensor:
        """N-HiTS beside a linear map: a block sees what those before it did not explain."""
        found: Tensor = self.line(history)
        for block in self.blocks:
            explained = block(history)
            history = history - explained[:, :HISTORY]
            found = found + explained[:, HISTORY:]
        return found

    def start(self, history: Tensor, targets: Tensor) -> None:
        """Start as the linear map, by ridge regression."""
        gram = history.T @ history + len(history) / 1000 * torch.eye(HISTORY).to(history)
        self.line.weight.copy_(torch.linalg.solve(gram, history.T @ targets).T)
        self.line.bias.zero_()
''',
    build='''
def build_model(hidden: int = $hidden, width: int = $width) -> Model:
    """A model with `hidden` units for effects, and blocks with `width` units per layer."""
    return Model(hidden, width)
''',
)

NHITS = forecast_template(
    "n-hits",
    "N-HiTS",
    _NETWORK,
    sizes={
        "small": {"hidden": 16, "width": 64},
        "medium": {"hidden": 32, "width": 128},
        "large": {"hidden": 64, "width": 256},
    },
)
