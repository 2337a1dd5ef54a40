"""CalibrateOperator outside a DAG: when it skips, fails at once, or leaves it to a retry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import doors
import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from trainwright.infra.lock import locked
from trainwright.operators import CalibrateOperator
from trainwright.tasks.errors import RunHeld
from trainwright.tasks.estimate.calibrate import cached

NO_CONTEXT: Any = {}


@pytest.mark.parametrize(
    ("device_type", "addresses", "says"),
    [
        ("nvidia-h200", ["localhost"], "this task does not measure GPUs"),
        ("emulated", ["localhost"], "configured, not measured"),
        ("cpu", ["10.0.0.7"], "at 10.0.0.7, not on this machine"),
    ],
)
def test_a_missing_device_type_is_skipped_with_a_reason(
    device_type: str, addresses: list[str], says: str, home: Path
) -> None:
    operator = CalibrateOperator(task_id="calibrate", device_type=device_type, addresses=addresses)
    with pytest.raises(AirflowSkipException, match=says):
        operator.execute(NO_CONTEXT)
    assert not home.exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device_type": "tpu"}, "bad_input: device type: got 'tpu'; allowed:"),
        ({"budget_s": "soon"}, "bad_input: budget_s: got 'soon'; allowed: a number"),
        ({"budget_s": 0}, "bad_input: budget_s: got 0"),
        ({"threads": "0"}, "bad_input: threads: got 0"),
        ({"store": "ftp://x"}, "bad_input: store: got 'ftp://x"),
    ],
)
def test_permanent_errors_fail_without_a_retry(
    options: dict[str, Any], says: str, home: Path, tmp_path: Path
) -> None:
    given = {"store": (tmp_path / "store").as_uri()} | options
    with pytest.raises(AirflowFailException, match=says):
        CalibrateOperator(task_id="calibrate", **given).execute(NO_CONTEXT)


def test_a_concurrent_measurement_is_left_to_a_retry(home: Path, tmp_path: Path) -> None:
    path = cached(1, doors.settings())
    path.parent.mkdir(parents=True)
    operator = CalibrateOperator(task_id="calibrate", store=(tmp_path / "store").as_uri())
    with locked(path.with_name(f"{path.name}.lock"), wait=False), pytest.raises(RunHeld):
        operator.execute(NO_CONTEXT)
