"""The work folders of agents on one host."""

from __future__ import annotations

import io
import os
from pathlib import Path

from trainwright.infra.lock import locked
from trainwright.tasks.train.hosts.agent import HostAgent


def test_only_the_folders_of_agents_that_have_ended_are_removed(home: Path) -> None:
    """A folder of a killed agent in a container: there, too, a process 1 exists."""
    here, folder = os.uname().nodename.replace(".", "-"), home / "nodes"
    names = (f"{here}.1.dead", f"{here}.killed", f"{here}.alive", "other-machine.1.dead")
    for name in names:
        (folder / name / "source").mkdir(parents=True)
    (folder / f"{here}.killed.lock").touch()
    with locked(folder / f"{here}.alive.lock", wait=False):
        agent = HostAgent(io.BytesIO(), io.BytesIO())
        second = HostAgent(io.BytesIO(), io.BytesIO())
        assert agent.work.is_dir()
        agent.end()
        second.end()
        left = {one.name for one in folder.iterdir()}
    assert left == {f"{here}.alive", f"{here}.alive.lock", "other-machine.1.dead"}
