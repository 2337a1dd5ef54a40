"""What clusters say of their nodes, asked in the background: an answer never waits long for one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.pool import Pool

WAIT_S = 1.0
"""How long an answer waits for a cluster."""
_FRESH_S = 10.0
"""A cluster is asked again after it."""
_KEPT_S = 60.0
"""What a cluster said is shown that long while it does not answer."""


class _Said(NamedTuple):
    at: float
    state: dict[str, Any]


class ClusterStates:
    """The newest state of each pool's cluster, for one event loop.

    `ask` takes a thread until the cluster answers, for one request of a pool at a time.
    """

    def __init__(self, ask: Callable[[Pool], dict[str, Any]]) -> None:
        self._ask = ask
        self._asking = dict[str, asyncio.Task[None]]()
        self._said = dict[str, _Said]()

    async def of(self, name: str, pool: Pool) -> dict[str, Any]:
        """The state as `cluster_state` gives it; unknown if the cluster takes too long."""
        now = time.monotonic()
        if (said := self._said.get(name)) is not None and now - said.at < _FRESH_S:
            return said.state
        asking = self._asking.get(name)
        if asking is None or asking.done():
            asking = self._asking[name] = asyncio.create_task(self._hear(name, pool))
        await asyncio.wait({asking}, timeout=WAIT_S)
        if asking.done():
            asking.result()  # raises what is not the cluster's silence
        said = self._said.get(name)
        if said is None or now - said.at > _KEPT_S:
            return {"engine": pool.engine, "nodes": None, "unknown": "no answer yet"}
        return said.state

    async def _hear(self, name: str, pool: Pool) -> None:
        try:
            state = await asyncio.to_thread(self._ask, pool)
        except BadInput as error:  # in the settings about the cluster
            state = {"engine": pool.engine, "nodes": None, "unknown": str(error)}
        self._said[name] = _Said(time.monotonic(), state)
