"""A process with Great Expectations that the tests of a process share.

Its import takes far longer than most checks. Each check still has a process of its own, a fork. A
process of the command line starts Great Expectations itself, as outside tests; so does a test that
sets the time limit or a variable that the process would get.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from trainwright.tasks.settings import VALIDATE_TIMEOUT_S
from trainwright.tasks.validate import check

_MODULE = "trainwright.tasks.validate.expectations"
_alone = check.exit_code


class SharedChecker:
    """Does what `check.exit_code` does, in a fork of one process, from its first command on."""

    def __init__(self) -> None:
        self._environment: dict[str, str] | None = None
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def exit_code(
        self, command: list[str], environment: Mapping[str, str], log: Path, timeout_s: float
    ) -> int:
        """The exit code of a command that checks data."""
        own = {name: value for name, value in environment.items() if name != "TMPDIR"}
        with self._lock:
            if self._environment is None:
                self._environment = own
            if timeout_s != VALIDATE_TIMEOUT_S or own != self._environment:
                return _alone(command, environment, log, timeout_s)
            assert command[:4] == [sys.executable, "-P", "-m", _MODULE]
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", __file__],
                    env=own,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps([*command[4:], str(log)]) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _serve() -> None:
    """Fork for each line of standard input, until it ends; write exit codes to standard output."""
    import gc

    gc.disable()
    from trainwright.tasks.validate import expectations

    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        question, answer, log = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(log)
            expectations.main(question, answer)
            sys.exit()
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201


def _become(log: str) -> None:
    """Make this fork like a process that has just been started."""
    import random
    import tempfile

    import numpy as np

    folder = os.path.dirname(log)
    os.chdir(folder)
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    random.seed()
    np.random.seed()
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT)
    for number, file in enumerate((nothing, output, output)):
        os.dup2(file, number)


if __name__ == "__main__":
    _serve()
