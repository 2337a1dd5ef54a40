"""How long this process has run without a stop, for those who judge the silence of others."""

from __future__ import annotations

import time

ASLEEP_S = 5.0
"""Who looks later than this was stopped, or its machine was. A busy machine delays it less."""


class Awake:
    """Since when this process runs. A stop (SIGSTOP, a frozen machine) begins that time again.

    What others said during the stop waits to be read, so their silence counts from its end.
    """

    def __init__(self) -> None:
        self._looked_at = self._since = time.monotonic()

    def since(self) -> float:
        """The time, on the monotonic clock. Call it about once a second."""
        now = time.monotonic()
        if now - self._looked_at > ASLEEP_S:
            self._since = now
        self._looked_at = now
        return self._since
