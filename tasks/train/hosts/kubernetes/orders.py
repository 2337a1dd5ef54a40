"""What the engine and its relays tell each other: a private folder for each pod."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from trainwright.tasks.spec.kubernetes_spec import Kubernetes
from trainwright.tasks.train.hosts.host_engine import HostStanding

_ORDER, _STANDING, _REFUSED = "order.json", "standing.json", "refused"


class RelayOrder(BaseModel):
    """The Job that a relay makes."""

    model_config = ConfigDict(frozen=True)
    name: str
    cluster: Kubernetes
    job: dict[str, Any]


class RelayFolder:
    """The folder; the order in it disappears when the Job is deleted."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def give(self, order: RelayOrder) -> None:
        """Make the folder, for this user only."""
        self.path.mkdir(mode=0o700)
        (self.path / _ORDER).write_text(order.model_dump_json())

    def order(self) -> RelayOrder:
        """What the engine gave."""
        return RelayOrder.model_validate_json((self.path / _ORDER).read_text())

    def stand(self, standing: HostStanding) -> None:
        """Tell where the request stands."""
        beside = self.path / f"{_STANDING}.new"
        beside.write_text(json.dumps(asdict(standing)))
        os.replace(beside, self.path / _STANDING)

    def standing(self) -> HostStanding:
        """Where the request stands; queued before the relay has told."""
        with contextlib.suppress(FileNotFoundError):
            return HostStanding(**json.loads((self.path / _STANDING).read_text()))
        return HostStanding("queued")

    def refuse(self, by_input: bool) -> None:
        """Tell that the relay ends, and whether what the user wrote is the reason."""
        if by_input:
            (self.path / _REFUSED).touch()

    @property
    def refused(self) -> bool:
        """Whether the request was refused for what the user wrote."""
        return (self.path / _REFUSED).exists()

    def end(self) -> None:
        """Tell that the Job is deleted."""
        (self.path / _ORDER).unlink(missing_ok=True)

    @property
    def ended(self) -> bool:
        """Whether the Job is deleted, or nobody tries any more."""
        return not (self.path / _ORDER).exists()
