"""Reconnects to the lost hosts of a launch while the training continues. Loads no torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from trainwright.tasks import progress
from trainwright.tasks.errors import TrainwrightError
from trainwright.tasks.train.hosts.remote_rank import RemoteShare
from trainwright.tasks.train.hosts.session import Session

TRY_EVERY_S = 10.0
_END_GRACE_S = 5.0
_log = logging.getLogger(__name__)
Shares = dict[int, RemoteShare]


class Reconnector:
    """The thread that reconnects.

    `lost` returns the addresses whose connection has ended. `connect` opens a new connection.
    `admit` checks and prepares a host as at the start, and returns its ranks' CPU shares.
    """

    def __init__(
        self,
        lost: Callable[[], list[str]],
        connect: Callable[[str], Session],
        admit: Callable[[Session], Shares],
    ) -> None:
        self._lost, self._connect, self._admit = lost, connect, admit
        self.back: dict[str, tuple[Session, Shares]] = {}
        """The reconnected hosts by address, until the caller removes them."""
        self._trying: Session | None = None
        self._reported: dict[str, str] = {}
        self._ending, self._idle, self._may_end = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self._thread = threading.Thread(target=self._run, name="reconnector", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ending.wait(TRY_EVERY_S):
                for address in self._lost():
                    if address not in self.back and not self._ending.is_set():
                        self._try(address)
        finally:
            self._idle.set()
            self._may_end.wait()  # the kernel ends a connection with the thread that made it

    def _try(self, address: str) -> None:
        session = None
        try:
            session = self._trying = self._connect(address)
            if self._ending.is_set():  # `settle` may not have seen this session
                session.hang_up("the launch has ended")
            self.back[address] = session, self._admit(session)
            self._reported.pop(address, None)
            progress.emit("notice", message=f"{session} answers again")
        except (TrainwrightError, OSError) as why:
            if session is not None:
                session.close(_END_GRACE_S)
            if self._reported.get(address) != str(why) and not self._ending.is_set():
                self._reported[address] = str(why)
                progress.emit(
                    "notice",
                    message=f"reconnecting to a lost host every {TRY_EVERY_S:g} s: {why}",
                )
        except Exception:  # noqa: BLE001 - logged; the other hosts are still tried
            _log.exception("host %s can't rejoin", address)
            if session is not None:
                session.close(_END_GRACE_S)
        finally:
            self._trying = None

    def settle(self) -> None:
        """Stop reconnecting, also the current attempt. Open connections stay until `close`."""
        self._ending.set()
        if (session := self._trying) is not None:
            session.hang_up("the launch has ended")
        self._idle.wait()

    def close(self) -> None:
        """End the thread, and the connections that the caller has not taken."""
        self.settle()
        for session, _ in self.back.values():
            session.close(_END_GRACE_S)
        self._may_end.set()
        self._thread.join()
