"""Measure a device type of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import AirflowSkipException

from trainwright.estimator.machine import MOST_DRIFT
from trainwright.operators.base import airflow_errors, given
from trainwright.operators.hooks import configured


class CalibrateOperator(BaseOperator):
    """Measure a device type: operations, training steps of small networks, the link between ranks; for every estimate.

    Made to be mapped over `Pool.kinds()`; alone it needs no argument and measures one CPU thread of the worker's machine.

    | input | default | meaning |
    |---|---|---|
    | `device_type` *(templated)* | cpu | a known device type |
    | `threads` *(templated)* | 1 | CPU threads |
    | `addresses` *(templated)* | localhost | where the pool has such devices |
    | `budget_s` *(templated)* | 90 | seconds to measure |
    | `most_drift` *(templated)* | `MOST_DRIFT`, 3.0 | how far the machine's speed may spread meanwhile, (p90 - p10) / median |
    | `store` *(templated)* | the settings' | where the calibration is left for other machines like this one |

    Returns `{"calibration": URI, "device_type", "threads", "measurements", "sentinel_drift", "cross_validated_error",
    "duration_s"}`; the object is `<store>/calibrations/<device type>/<key>.json`, the key of processor, torch and threads.

    | failure | what Airflow does |
    |---|---|
    | a device type that is not on this machine, a GPU, an emulated device | skips the task, saying why |
    | unknown device type, a budget or number that is not allowed | fails at once, no retry |
    | the machine busy, another measuring the same, the store out of reach, killed | fails; retried as `retries` say |

    One that was cut short goes on from what it has measured when it is tried again.
    """

    template_fields: Sequence[str] = (
        "device_type",
        "threads",
        "addresses",
        "budget_s",
        "most_drift",
        "store",
    )

    def __init__(
        self,
        *,
        device_type: str = "cpu",
        threads: int | str = 1,
        addresses: Sequence[str] = ("localhost",),
        budget_s: float | str = 90.0,
        most_drift: float | str = MOST_DRIFT,
        store: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.device_type = device_type
        self.threads = threads
        self.addresses = addresses
        self.budget_s = budget_s
        self.most_drift = most_drift
        self.store = store

    def execute(self, context: Context) -> dict[str, Any]:
        """Measure, and leave the calibration in the cache and the store."""
        from trainwright.tasks.estimate.calibrate import calibrate_and_share, why_not_here
        from trainwright.tasks.spec.documents import number

        with airflow_errors():
            why_not = why_not_here(self.device_type, self.addresses)
            if why_not is not None:
                raise AirflowSkipException(why_not)
            return calibrate_and_share(
                self.device_type,
                int(number("threads", self.threads)),
                configured(),
                budget_s=number("budget_s", self.budget_s),
                most_drift=number("most_drift", self.most_drift),
                store=given(self.store),
            )
