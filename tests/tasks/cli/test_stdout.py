"""A command's stdout has what the command prints, and nothing that a library writes there."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import ctypes
from trainwright.tasks.cli.main import keep_stdout
keep_stdout()
ctypes.CDLL(None).puts(b"a line of a C library")
print("the answer")
"""


def test_lines_of_c_code_go_to_stderr() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout == "the answer\n"
    assert done.stderr == "a line of a C library\n"


def test_a_closed_stdout_or_stderr_is_left_as_it_is() -> None:
    program = "from trainwright.tasks.cli.main import keep_stdout; keep_stdout()"
    for closed in (">&-", "2>&-"):
        subprocess.run(["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, program], check=True)
