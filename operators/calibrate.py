"""`CalibrateOperator`: measure a device type of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import AirflowSkipException

from trainwright.estimator.machine import MOST_DRIFT
from trainwright.operators.base import given
from trainwright.operators.failures import airflow_errors, lines_in_log
from trainwright.operators.hooks import configured


class CalibrateOperator(BaseOperator):
    """Measure a device type for estimates: operations, small networks, the link between ranks.

    Map it over `Pool.kinds()`. Without arguments it measures one CPU thread of the worker's
    machine. A retry continues an interrupted measurement.

    | input | default | meaning |
    |---|---|---|
    | `device_type` *(templated)* | cpu | a known device type |
    | `threads` *(templated)* | 1 | CPU threads |
    | `addresses` *(templated)* | localhost | the addresses at which the pool has such devices |
    | `budget_s` *(templated)* | 90 | seconds to measure |
    | `most_drift` *(templated)* | 3.0 | highest allowed drift of speed, (p90 - p10) / median |
    | `store` *(templated)* | as configured | the store in which equal machines find it |

    Returns `{"calibration": URI, "device_type", "threads", "measurements", "sentinel_drift",
    "cross_validated_error", "duration_s"}`. The object is `<store>/calibrations/<device
    type>/<key>.json`; the key is made of processor, torch and threads.

    | failure | what Airflow does |
    |---|---|
    | a device type that this machine lacks, a GPU, an emulated device | skips, with the reason |
    | unknown device type, a budget or number out of range | fails without a retry |
    | busy machine, same measurement elsewhere, unreachable store, killed | retries |
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
        """Measure, and keep the calibration in the cache and the store."""
        from trainwright.tasks.estimate.calibrate import calibrate_and_share, why_not_here
        from trainwright.tasks.spec.documents import number, texts, whole_number

        with airflow_errors(), lines_in_log():
            device_type = str(self.device_type)
            why_not = why_not_here(device_type, texts("addresses", self.addresses))
            if why_not is not None:
                raise AirflowSkipException(why_not)
            made = calibrate_and_share(
                device_type,
                whole_number("threads", self.threads),
                configured(),
                budget_s=number("budget_s", self.budget_s),
                most_drift=number("most_drift", self.most_drift),
                store=given(self.store),
            )
            error = made["cross_validated_error"]["median"]
            self.log.info("%s: median error %.0f %%", made["calibration"], 100 * error)
            return made
