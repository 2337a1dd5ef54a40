"""The cgroup quota that limits a rank to its share of the CPU."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.train import cpu_share
from trainwright.tasks.train.cpu_share import PERIOD_US, quota_us


@given(st.floats(0.001, 64))
def test_quota_over_period_equals_the_share_even_for_a_tiny_share(cores: float) -> None:
    quota, period = quota_us(cores)
    assert quota / period == pytest.approx(cores, rel=0.01, abs=1 / PERIOD_US)
    assert quota >= 1000
    assert PERIOD_US <= period <= 1_000_000


def test_a_cgroup_that_a_launcher_in_another_container_holds_is_not_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders are the cgroups here. No process has such a number."""
    monkeypatch.setattr(cpu_share, "_parents", lambda: (tmp_path,))
    number = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    dead, held, own = (f"trainwright-{one}" for one in (f"{number}-0", f"{number}-1", "1-0"))
    for name in (dead, held, own):
        (tmp_path / name).mkdir()
    holding = os.open(tmp_path / held, os.O_RDONLY)
    try:
        fcntl.flock(holding, fcntl.LOCK_EX)
        cpu_share.remove_stale_cgroups()
    finally:
        os.close(holding)
    assert {one.name for one in tmp_path.iterdir()} == {held, own}
