from __future__ import annotations

import ast
from pathlib import Path

from trainwright.tasks.train import membership

IMPURE = {
    "asyncio",
    "os",
    "random",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
    "torch",
    "trainwright.tasks.progress",
    "trainwright.tasks.train.channel",
    "trainwright.tasks.train.hosts",
    "trainwright.tasks.train.launcher",
}


def test_membership_imports_no_clock_no_process_and_no_socket() -> None:
    for path in Path(membership.__file__).parent.glob("*.py"):
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {one.name for one in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                names |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
        assert names & IMPURE == set(), path
