"""The sandbox by itself: requests, limits, and kills of its own processes.

`tests/e2e/test_hostile_models.py` tests hostile code.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.infra.sandbox import Outcome, SandboxLimits
from trainwright.infra.sandbox.client import SandboxServer, message, scrubbed_environment

LIMITS = SandboxLimits(timeout_s=60, memory_bytes=2**30)
SECONDS = "81818.5"
"""the sleep time of a process in the sandbox, by which a test finds it"""


EARLIER: dict[str, list[psutil.Process]] = {"children": []}


@pytest.fixture(autouse=True)
def _earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """The children that the test process already has, such as the session's S3 server."""
    monkeypatch.setitem(EARLIER, "children", psutil.Process().children())


def own_children() -> list[psutil.Process]:
    """The children of this test."""
    return [one for one in psutil.Process().children() if one not in EARLIER["children"]]


@contextmanager
def serving(
    function: str, variables: dict[str, str] | None = None, **options: Any
) -> Iterator[SandboxServer]:
    """A server for a function of `sandbox_functions`."""
    environment = scrubbed_environment() | {"PYTHONPATH": str(Path(__file__).parent)}
    environment |= variables or {}
    name = f"sandbox_functions:{function}"
    with SandboxServer(name, environment=environment, **options) as server:
        yield server


def _sleeping() -> list[psutil.Process]:
    every = psutil.process_iter(["cmdline"])
    return [one for one in every if SECONDS in (one.info["cmdline"] or ())]


def _until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _supervisor() -> psutil.Process:
    """The supervisor of this test's sandbox: the child of the only server."""
    (server,) = own_children()
    (supervisor,) = server.children()
    return supervisor


def test_concurrent_requests_run_in_separate_processes() -> None:
    with serving("echo") as server, ThreadPoolExecutor(4) as pool:
        assert server.wait_ready() == "own namespaces"
        requests = [{"number": number} for number in range(8)]
        outcomes = list(pool.map(lambda one: server.ask(one, LIMITS), requests))
    assert [json.loads(one.answer) for one in outcomes] == requests
    assert {one.exit_code for one in outcomes} == {0}


def test_a_sandbox_has_a_scrubbed_environment_a_folder_and_only_its_own_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    with serving("describe") as server:
        server.wait_ready()
        seen = json.loads(server.ask({}, LIMITS).answer)
    assert "secret" not in str(seen["environment"])
    assert seen["environment"]["HOME"] == seen["environment"]["TMPDIR"] == seen["folder"] == "/tmp"
    assert seen["written"] == "written"
    assert seen["processes"] == [1, 2]
    assert len(seen["files"]) == 5  # the three standard ones, the answer's, and the listed folder


def test_a_file_can_be_read_only_if_the_request_may_read_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    request = {"path": str(tmp_path / "file")}
    with serving("read") as server:
        server.wait_ready()
        assert server.ask(request, LIMITS, readable=[tmp_path]).answer == b"content"
        refused = server.ask(request, LIMITS)
    assert refused.answer == b""
    assert "FileNotFoundError" in refused.last_line


def test_modules_imported_by_the_warm_up_request_are_ready_for_the_others() -> None:
    for warm_up, known in ((None, "False"), ({}, "True")):
        with serving("use_lazily", warm_up=warm_up) as server:
            server.wait_ready()
            assert server.ask({}, LIMITS).answer.decode() == f"colorsys: {known}"


def test_without_protection_the_limits_hold_and_the_environment_is_kept() -> None:
    with serving("describe", confined=False) as server:
        assert server.wait_ready() == "none"
        seen = json.loads(server.ask({}, LIMITS).answer)
        assert os.getpid() in seen["processes"]
    with serving("print_and_wait", confined=False) as server:
        server.wait_ready()
        outcome = server.ask({}, SandboxLimits(timeout_s=1, memory_bytes=2**30))
    assert (outcome.stopped_by, outcome.last_line, outcome.answer) == ("time", "last", b"")


def test_nothing_runs_if_a_limit_can_not_be_set() -> None:
    with serving("echo") as server:
        server.wait_ready()
        with pytest.raises(OSError, match=r"sandbox: could not be set up: .*mount /tmp"):
            server.ask({}, SandboxLimits(timeout_s=60, memory_bytes=2**30, disk_bytes=-1))
    with serving("echo", confined=False) as server:
        server.wait_ready()
        with pytest.raises(OSError, match="sandbox: could not be set up"):
            server.ask({}, SandboxLimits(timeout_s=60, memory_bytes=-(2**70)))


def test_an_answer_that_is_too_large_is_stopped() -> None:
    with serving("echo") as server:
        server.wait_ready()
        limits = SandboxLimits(timeout_s=60, memory_bytes=2**30, disk_bytes=2**20)
        outcome = server.ask({"text": "x" * 2**22}, limits)
    assert (outcome.stopped_by, outcome.answer) == ("disk", b"")


@pytest.mark.parametrize("function", ["fill_file_in_memory", "fill_segment"])
@pytest.mark.parametrize("groups", ["any", "none"])
def test_memory_that_no_process_maps_is_limited(function: str, groups: str) -> None:
    limits = SandboxLimits(timeout_s=60, memory_bytes=2**28, disk_bytes=2**24)
    with serving(function, {"GROUPS_OF_MEMORY": groups}) as server:
        server.wait_ready()
        much = server.ask({"mebibytes": 512}, limits)
        assert not much.answer
        if groups == "none":  # or no group can be made here
            assert "Function not implemented" in much.last_line
        elif "Function not implemented" not in much.last_line:
            assert much.stopped_by == "memory"
            assert server.ask({"mebibytes": 16}, limits).answer == b"written"


def test_a_function_that_can_not_be_imported_is_an_error_with_its_cause() -> None:
    with (
        SandboxServer("no_such_module:answer", environment=scrubbed_environment()) as server,
        pytest.raises(OSError, match=r"did not start: ModuleNotFoundError: .*no_such"),
    ):
        server.wait_ready()


def test_a_server_killed_during_its_start_is_an_error() -> None:
    with serving("echo") as server:
        (process,) = own_children()
        process.kill()
        with pytest.raises(OSError, match="did not start: exit code -9"):
            server.wait_ready()


def test_a_closed_connection_ends_the_work_on_its_request() -> None:
    with serving("sleep") as server:
        server.wait_ready()
        with server.connect() as connection:
            connection.sendall(message({"seconds": SECONDS}, LIMITS))
            connection.shutdown(socket.SHUT_WR)
            _until(_sleeping)
        _until(lambda: not _sleeping())


def test_a_killed_supervisor_ends_the_sandbox_and_the_client_gets_an_error() -> None:
    with serving("sleep") as server, ThreadPoolExecutor(1) as pool:
        server.wait_ready()
        asked = pool.submit(server.ask, {"seconds": SECONDS}, LIMITS)
        _until(_sleeping)
        _supervisor().send_signal(signal.SIGKILL)
        with pytest.raises(OSError, match="sandbox: the supervisor was killed"):
            asked.result()
        _until(lambda: not _sleeping())


def test_a_closed_server_waits_until_its_sandboxes_have_ended() -> None:
    with serving("sleep") as server:
        server.wait_ready()
        asked = ThreadPoolExecutor(1).submit(
            server.ask, {"seconds": SECONDS}, SandboxLimits(3, 2**30)
        )
        _until(_sleeping)
        server.close()
        assert asked.result().stopped_by == "time"
        assert not _sleeping()


@given(
    st.builds(
        Outcome,
        st.sampled_from(["own namespaces", "audit hook"]),
        st.none() | st.sampled_from(["time", "memory", "processes", "disk", "client"]),
        st.none() | st.integers(-64, 255),
        st.integers(0, 64),
        st.text(),
        st.binary(),
    )
)
def test_an_outcome_survives_a_round_trip(outcome: Outcome) -> None:
    assert Outcome.from_bytes(outcome.to_bytes()) == outcome


@pytest.mark.parametrize(("gib", "words"), [(12, "12"), (0.001, "0.001"), (2**20, "1,048,576")])
def test_a_limit_of_memory_is_written_without_an_exponent(gib: float, words: str) -> None:
    assert SandboxLimits(60, int(gib * 2**30)).memory_words() == f"{words} GiB"


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (Outcome("none", "time"), "did not end within 60 s"),
        (Outcome("none", "time", children=2), "60 s (2 process(es) that it had started still ran)"),
        (Outcome("none", "time", last_line="at 3"), "within 60 s; its last output: at 3"),
        (
            Outcome("none", "time", last_line="MemoryError"),
            "took too much memory and did not end within 60 s: MemoryError; allowed: 1 GiB",
        ),
        (Outcome("none", "memory"), "took too much memory; allowed: 1 GiB"),
        (Outcome("none", "processes"), "started more than the 64 processes allowed"),
        (Outcome("none", "disk"), "wrote more than the 256 MiB allowed"),
        (Outcome("none", exit_code=-9), "was killed, perhaps by the kernel for lack of memory"),
        (Outcome("none", exit_code=-11), "crashed with signal 11"),
        (Outcome("none", exit_code=0), "ended its process without an answer"),
        (Outcome("none", exit_code=3, last_line="no"), "ended its process with exit code 3: no"),
        (Outcome("none", exit_code=1, last_line="allocating"), "exit code 1: allocating"),
    ],
)
def test_a_failure_names_its_cause(outcome: Outcome, says: str) -> None:
    assert says in outcome.failure(LIMITS)
