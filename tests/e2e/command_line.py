"""The command line, called through its entry point in the test's own process, which starts quickly.

Tests of signals, pipes and imports start a separate process: `TRAINWRIGHT` is the command.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from trainwright.tasks.cli.main import main

TRAINWRIGHT = [sys.executable, "-m", "trainwright.tasks.cli.main"]


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `trainwright ARGS` with these variables, and restore the signal handlers."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", ["trainwright", *args])
        for name, value in environment.items():
            patch.setenv(name, value)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    code = ended.value.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


def process(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `trainwright ARGS` in a separate process."""
    return subprocess.run(
        [*TRAINWRIGHT, *args],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=200,
        check=False,
    )


@contextlib.contextmanager
def small_files(most_bytes: int) -> Iterator[None]:
    """Limit the files that this process writes, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def little_memory(more_bytes: int = 2**30) -> Iterator[None]:
    """Limit this process to its current address space plus `more_bytes`."""
    with open("/proc/self/statm") as file:
        has = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (has + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
