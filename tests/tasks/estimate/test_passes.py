"""What passes of pipelines take this machine's ranks: measured, cached, used by estimates."""

from __future__ import annotations

from typing import Any

import doors
import pytest

from trainwright.estimator.predict.pass_cost import PRIOR_PASSES, PassCost
from trainwright.tasks import progress
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.estimate import passes
from trainwright.tasks.estimate.training_probe import measured_by
from trainwright.tasks.runs.artefacts.estimate import Estimate


def test_passes_are_measured_and_cached(home: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "PASSES_S", 0.1)
    assert passes.known_passes(doors.settings()) is None
    found = passes.renew_passes(doors.settings())
    assert found is not None
    assert found.measured
    for seconds in (found.message_s, found.layer_s):
        assert 0 < seconds < 0.1
    assert passes.known_passes(doors.settings()) == found


def test_a_truncated_cost_is_not_used(home: Any) -> None:
    heard: list[dict[str, Any]] = []
    progress.listen(heard.append)
    path = passes.passes_file(doors.settings())
    path.parent.mkdir(parents=True)
    path.write_text('{"pass_s": 1')
    assert passes.known_passes(doors.settings()) is None
    assert "not a cost, or truncated" in heard[-1]["message"]


def test_a_measurement_that_fails_says_why(home: Any) -> None:
    with pytest.raises(TrainwrightError, match=r"measuring passes exited with 2: .*budget"):
        measured_by("trainwright.tasks.train.worker.measure_passes", "passes", "soon")  # type: ignore[arg-type]


def test_a_cost_that_can_not_be_cached_is_an_error(
    home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "measured_by", lambda *_: PRIOR_PASSES.model_dump_json().encode())
    home.mkdir()
    (home / "passes").touch()
    with pytest.raises(BadInput, match="passes"):
        passes.renew_passes(doors.settings())


def test_an_estimate_without_a_measurement_assumes_a_cost() -> None:
    known = Estimate(mode="datasheet", curves=[], gradient_bytes=0.0)
    assert known.pass_cost == PRIOR_PASSES
    assert not known.pass_cost.measured
    own = PassCost(pass_s=1, message_s=1, byte_s=0, delay_s=0, layer_s=0, measured=True)
    assert known.model_copy(update={"passes": own}).pass_cost == own
