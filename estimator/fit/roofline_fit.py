"""Fits rooflines to timed operations. The prior is the device's datasheet.

The logarithms of the three constants of a family f are

    log a_f = log(latency_f) + g_a + d_af               g ~ N(0, GENERAL_WIDTH²)  of the device
    log F_f = log(share_f · peak) + g_F + d_Ff          d ~ N(0, OWN_WIDTH²)      of the family
    log B_f = log(share_f · bandwidth) + g_B + d_Bf

with latencies and shares from `predict.datasheet`. Times scatter around the roofline by a Laplace
distribution of scale NOISE. The fit is the mode of the posterior: a family with few measurements
stays near the datasheet, corrected by the whole device's deviation (g); many measurements outweigh
both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.estimator.devices import DEVICE_TYPES
from trainwright.estimator.predict import datasheet
from trainwright.estimator.predict.op_cost import FamilyCost, Kernel, OpSample, Roofline

GENERAL_WIDTH = (datasheet.LATENCY_WIDTH, datasheet.RATE_WIDTH, datasheet.RATE_WIDTH)
OWN_WIDTH = 0.5
NOISE = 0.3
_ROUNDS = 4  # of the alternation between g and d; g has converged within 5 % then


@dataclass(frozen=True)
class DevicePrior:
    """The prior of each family's roofline on a device.

    `sheet` describes one core of a CPU: n `threads` reach n times its rates. `general` is g, shape
    (3,); it is 0 before `given` gets samples.
    """

    device_type: str
    threads: int = 1
    general: Any = 0.0

    def center(self, family: str) -> Any:
        """The expected logarithms of a family's constants, shape (3,)."""
        return self._sheet(family) + self.general

    def unmeasured(self, family: str) -> FamilyCost:
        """The cost of a family without samples: as uncertain as its constants."""
        return FamilyCost(
            roofline=_roofline(self.center(family)),
            dims=(),
            kernel=Kernel(lengths=(), family_sigma=OWN_WIDTH, kind_sigma=0.0, noise=0.0),
            kinds=(),
            points=(),
            weights=(),
        )

    def given(self, samples: Mapping[str, Sequence[OpSample]]) -> DevicePrior:
        """The prior with the g that fits the samples by family.

        Alternates between d given g, each family alone, and g given d:
        g = Σ (log constant − log sheet) / (families + OWN_WIDTH² / GENERAL_WIDTH²).
        """
        import numpy as np

        found = self
        shrink = len(samples) + (OWN_WIDTH / np.array(GENERAL_WIDTH)) ** 2
        for _ in range(_ROUNDS):
            off = [
                _logs(fit_roofline(*sample_arrays(members), found.center(family)))
                - self._sheet(family)
                for family, members in samples.items()
            ]
            found = DevicePrior(self.device_type, self.threads, sum(off) / shrink)
        return found

    def _sheet(self, family: str) -> Any:
        sheet = _logs(datasheet.reached(DEVICE_TYPES[self.device_type], family))
        if self.device_type == "cpu":
            sheet[1:] += math.log(self.threads)
        return sheet


def fit_roofline(flops: Any, moved: Any, seconds: Any, center: Any) -> Roofline:
    """The most probable roofline of a family; `center` is the mean of its prior.

    The weight of an operation is the square root of its share of the time, because long operations
    matter more to a step.
    """
    import numpy as np
    from scipy.optimize import minimize

    weights = np.sqrt(seconds)
    weights *= len(seconds) / weights.sum()

    def loss(logs: Any) -> float:
        off = np.log(_roofline(logs)(flops, moved) / seconds)
        away = (logs - center) / OWN_WIDTH
        return float((weights * np.abs(off)).sum() / NOISE + (away**2).sum() / 2)

    found = minimize(
        loss,
        center,
        method="Nelder-Mead",
        options={"maxiter": 300, "xatol": 1e-3, "fatol": 1e-3},
    )
    return _roofline(found.x)


def sample_arrays(samples: Sequence[OpSample]) -> tuple[Any, Any, Any]:
    """FLOPs, bytes and seconds of samples, each of shape (n,)."""
    import numpy as np

    flops, moved, seconds = (
        np.array([getattr(one, name) for one in samples]) for name in ("flops", "bytes", "seconds")
    )
    return flops, moved, seconds


def _logs(roofline: Roofline) -> Any:
    import numpy as np

    return np.log([roofline.latency_s, roofline.flops_per_s, roofline.bytes_per_s])


def _roofline(logs: Any) -> Roofline:
    import numpy as np

    latency_s, flops_per_s, bytes_per_s = np.exp(np.clip(logs, -40.0, 42.0)).tolist()
    return Roofline(latency_s=latency_s, flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
