from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from memory_cgroups import limited_cgroup

from trainwright.infra.memory_limit import kernel_oom_kills
from trainwright.tasks.errors import BadInput, RunHeld, TrainingFailed
from trainwright.tasks.train.channel import LauncherChannel
from trainwright.tasks.train.launcher.rank_process import (
    CUDA_ALLOCATOR,
    RankProcess,
    Usage,
    error_of_rank,
    start_process,
)


def process_of(program: str) -> RankProcess:
    channel = LauncherChannel()
    channel.close()
    popen = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    return RankProcess(0, popen, channel, Path("its.log"))


@pytest.fixture
def memory_cgroup(tmp_path: Path) -> Iterator[Path]:
    """A cgroup whose processes may hold 40 MB."""
    with limited_cgroup(tmp_path.name, 40) as group:
        yield group


def test_an_out_of_memory_kill_by_the_kernel_differs_from_another_kill(memory_cgroup: Path) -> None:
    before = kernel_oom_kills()
    tasks = str(memory_cgroup / "cgroup.procs")
    join = f"open({tasks!r}, 'w').write(str(__import__('os').getpid())); "
    process = process_of(join + "bytearray(400 << 20)")
    assert process.process.wait() == -signal.SIGKILL
    kills = kernel_oom_kills() - before
    assert process.out_of_memory(kills)
    assert process.how_it_ended(kills) == (
        "was killed by SIGKILL, most likely by the kernel for lack of memory"
    )
    assert not process.out_of_memory(0)
    assert process.how_it_ended(0) == "was killed by SIGKILL"


def test_a_process_killed_by_the_launcher_keeps_the_first_reason() -> None:
    process = process_of("import time; time.sleep(600)")
    process.kill("hung and was killed")
    process.kill()
    assert process.how_it_ended(7) == "hung and was killed"
    assert not process.out_of_memory(7)


def test_an_exit_is_reported_with_its_code() -> None:
    assert process_of("raise SystemExit(3)").how_it_ended(0) == "exited with 3"


def test_the_usage_of_two_processes_is_their_maximum_memory_and_total_time() -> None:
    first, second = Usage(8e8, 3.0), Usage.of({"peak_memory_bytes": 5e8, "cpu_s": 4.0, "step": 1})
    assert first.then(second) == Usage(8e8, 7.0)


def test_an_error_names_its_rank_and_log_unless_all_ranks_report_the_same() -> None:
    def error_from(document: dict[str, object]) -> object:
        return error_of_rank(1, "here/1", document, Path("its.log"))

    failed = error_from({"kind": "training_failed", "message": "a cable came loose", "step": 3})
    assert isinstance(failed, TrainingFailed)
    assert str(failed) == "rank 1 (here/1): a cable came loose; its log is its.log"
    assert failed.details == {"rank": 1, "step": 3}
    for same in (BadInput("data: no such file"), RunHeld("another trains this run")):
        assert str(error_from(same.document())) == str(same)


@pytest.mark.parametrize("given", [None, "max_split_size_mb:128"])
def test_a_rank_has_the_settings_of_the_gpu_allocator(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CUDA_ALLOCATOR, raising=False)
    if given is not None:
        monkeypatch.setenv(CUDA_ALLOCATOR, given)
    process = start_process(
        tmp_path / "order.json", 0, slot=3, threads=2, log=tmp_path / "log", interface={}
    )
    try:
        found: dict[str, str] = {}
        ends = time.monotonic() + 60
        while not found and time.monotonic() < ends:  # none while the process replaces its program
            found = psutil.Process(process.process.pid).environ()
    finally:
        process.kill()
        process.process.wait()
        process.channel.close()
    assert found[CUDA_ALLOCATOR] == (given or "expandable_segments:True")
    assert found["OMP_NUM_THREADS"] == "2"
