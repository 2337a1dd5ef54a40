"""The console blocks of the manual's pages: run in order, their output compared with the page.

A comment before a block says what it is (docs/contributing.md lists them):

    <!-- file: NAME -->       a file, which later blocks use
    <!-- not run: REASON -->  it can't run here
    <!-- exit: CODE -->       its last command ends with this code
    <!-- example: NAME -->    another test uses it

Lines after `$ COMMAND` are its output: compared without figures, ids and the width of columns. A
line `…` stands for any lines, `…` in a line for any text. A command without output on the page may
print anything. The word RUN is the id of the newest run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from doc_pages import ROOT

_BLOCK = re.compile(r"(?ms)(?:^ *<!-- ([a-z ]+): ([^\n]*?) -->\n)?^( *)```(\w+)\n(.*?)^ *```$")
_RUN_ID = re.compile(r"\b\d{8}T\d{6}Z-[0-9a-f]{6}\b")
_NUMBER = re.compile(
    r"(?<![A-Za-z\d])[\d.]*\d(?:[,.]\d+)*(?:e[-+]?\d+)?(?:\s?(?:[µm]?s|min|[kMGT]i?B|kJ|J|%)\b)?"
)
_MARK = "@@ended"
STORE = "s3://trainwright/manual"
"""Apart from the store of other tests, whose runs would change what is printed."""


@dataclass(frozen=True)
class Block:
    """A code block, and the comment before it."""

    language: str
    text: str
    mark: str = ""
    """`file`, `not run`, `exit`, `example`, or nothing"""
    value: str = ""

    def commands(self) -> list[tuple[str, list[str]]]:
        """Each command, with the output that the page shows."""
        found: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif found and found[-1][0].endswith("\\") and line.startswith("> "):
                found[-1] = (f"{found[-1][0]}\n{line[2:]}", [])
            else:
                found[-1][1].append(line)
        return found


def blocks_of(page: Path) -> list[Block]:
    """The page's blocks, in order."""
    return [
        Block(language, textwrap.dedent(text), mark, value)
        for mark, value, _, language, text in _BLOCK.findall(page.read_text())
    ]


@dataclass(frozen=True)
class Ended:
    """A command that was run: its output, and the code with which it ended."""

    command: str
    shown: list[str]
    output: str
    code: int


def run_page(page: Path, folder: Path) -> list[Ended]:
    """Write the page's files and run its console blocks in a folder, which has the tree's dags/."""
    (folder / "dags").symlink_to(ROOT / "dags")
    ended = []
    for block in blocks_of(page):
        if block.mark == "file":
            (folder / block.value).write_text(block.text)
        elif block.language == "console" and block.mark in ("", "exit"):
            done = _run(block, folder)
            ended += done
            for one in done[:-1]:
                assert one.code == 0, f"{one.command}\n{one.output}"
            expected = int(block.value) if block.mark == "exit" else 0
            assert done[-1].code == expected, f"{done[-1].command}\n{done[-1].output}"
    return ended


def _run(block: Block, folder: Path) -> list[Ended]:
    """Run a block's commands in one shell."""
    commands = block.commands()
    mark = f"printf '\\n{_MARK} %s\\n' $?"
    script = "".join(f"{_with_run(one)}\n{mark}\n" for one, _ in commands)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )
    printed = done.stdout.replace(STORE, "s3://trainwright")
    parts = re.split(rf"\n{_MARK} (\d+)\n", printed)
    assert len(parts) == 2 * len(commands) + 1, f"a command ended the block's shell:\n{printed}"
    return [
        Ended(command, shown, output, int(code))
        for (command, shown), output, code in zip(commands, parts[:-1:2], parts[1::2], strict=True)
    ]


def _with_run(command: str) -> str:
    """The command with the newest run's id for the word RUN."""
    if not re.search(r"\bRUN\b", command):
        return command
    listed = [sys.executable, "-m", "trainwright.tasks.cli.main", "runs", "--json"]
    found = json.loads(subprocess.run(listed, capture_output=True, check=True).stdout)
    return re.sub(r"\bRUN\b", str(found["runs"][0]["id"]), command)


def plain(line: str) -> str:
    """A line without figures, ids and the width of columns."""
    line = _NUMBER.sub("0", _RUN_ID.sub("ID", line))
    return re.sub(r"[\s─━╭╮╰╯│┃┏┓┗┛┡┩├┤┼┬┴╇╈]+", " ", line).strip()


def difference(one: Ended) -> str | None:
    """Why the output is not what the page shows; None: it is."""
    shown = [plain(line) for line in one.shown if plain(line)]
    if not shown:
        return None
    printed = [plain(line) for line in one.output.splitlines() if plain(line)]
    if re.fullmatch(_whole(shown), "\n".join([*printed, ""])):
        return None
    return f"$ {one.command}\n--- the page\n" + "\n".join(shown) + "\n--- printed\n" + one.output


def _whole(shown: list[str]) -> str:
    """The shown lines as one pattern."""
    return "".join(r"(?:.*\n)*?" if line == "…" else _pattern(line) + r"\n" for line in shown)


def _pattern(line: str) -> str:
    return re.escape(line).replace("…", ".*")
