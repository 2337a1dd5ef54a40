"""The cgroup that gives a rank its share of the CPU: a weight, and a quota."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.infra import cpu_share
from trainwright.infra.cpu_share import (
    MOST_SHARES,
    PERIOD_US,
    CpuShare,
    processors,
    quota_us,
    shares_of,
)


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


JOINS = """
import os, sys, threading
from pathlib import Path
from trainwright.infra.cpu_share import join_cgroup

before = threading.Thread(target=threading.Event().wait, daemon=True)
before.start()
join_cgroup(Path(sys.argv[1]))
for thread in (threading.get_native_id(), before.native_id):
    for line in Path(f"/proc/self/task/{thread}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("cpu", "cpu,cpuacct", ""):
            print(path, flush=True)
"""


@pytest.mark.parametrize("cores", [0.5, float(processors())])
def test_a_rank_weighs_more_than_other_programs_and_has_a_quota_unless_it_is_the_machine(
    cores: float,
) -> None:
    """Without permission to make cgroups, only a fraction of a core is held to it."""
    share = CpuShare("weighed", cores)
    try:
        if share.group is None:
            assert share.how == ("duty cycle" if cores < 1 else "none")
            return
        compute = share.group / "compute"
        if (share.group / "cpu.shares").exists():
            assert int((share.group / "cpu.shares").read_text()) == shares_of(cores) > 1024
            assert compute.exists() == (cores < processors())
            if compute.exists():
                quota = int((compute / "cpu.cfs_quota_us").read_text())
                assert quota == cores * int((compute / "cpu.cfs_period_us").read_text())
        else:
            assert int((share.group / "cpu.weight").read_text()) > 100
            assert (share.group / "cpu.max").read_text().startswith("max") == (
                cores >= processors()
            )
        joined = subprocess.run(
            [sys.executable, "-c", JOINS, str(share.group)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert joined.count(f"/{share.group.name}") == 2
        assert joined.count("/compute\n") == compute.exists()
    finally:
        share.remove()
    assert not share.group.exists()


@given(st.floats(0.001, 4096), st.floats(0.001, 4096))
def test_more_cores_weigh_more_up_to_the_kernels_limit(one: float, two: float) -> None:
    least, most = sorted((shares_of(one), shares_of(two)))
    assert 1024 <= least <= most <= MOST_SHARES
    assert shares_of(min(one, two)) == least
