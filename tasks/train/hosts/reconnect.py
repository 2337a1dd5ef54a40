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
    """The threads that reconnect: one for each host, as one may wait in a cluster's queue for long.

    `lost` returns the addresses that have no connection. `connect` opens one, or returns one whose
    host is still in the queue. `admit` checks and prepares a host as at the start, and returns its
    ranks' CPU shares.
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
        self._trying: dict[str, Session | None] = {}
        self._threads: list[threading.Thread] = []
        self._reported: dict[str, str] = {}
        self._ending, self._may_end = threading.Event(), threading.Event()
        self._changing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="reconnector", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            self._threads = [one for one in self._threads if one.is_alive()]
            for address in self._lost():
                if address not in self._trying and address not in self.back:
                    self._trying[address] = None
                    self._start(address)
            self._ending.wait(TRY_EVERY_S)

    def _start(self, address: str) -> None:
        def attempt() -> None:
            admitted = self._try(address)
            if admitted:
                self._may_end.wait()  # the kernel ends a connection with the thread that made it

        thread = threading.Thread(target=attempt, name=f"reconnect-{address}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _try(self, address: str) -> bool:
        """Reconnect to a host. Returns whether it has been admitted."""
        session = None
        try:
            session = self._connect(address)
            with self._changing:
                self._trying[address] = session
            if self._ending.is_set():  # `settle` may not have seen this session
                session.hang_up("the launch has ended")
            shares = self._admit(session)
            self._reported.pop(address, None)
            self.back[address] = session, shares
            progress.emit("notice", message=f"{session} answers again")
            return True
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
            with self._changing:
                del self._trying[address]
        return False

    def settle(self) -> None:
        """Stop reconnecting, also the current attempts. Open connections stay until `close`."""
        self._ending.set()
        self._thread.join()
        while True:
            with self._changing:
                trying = dict(self._trying)
            if not trying:
                return
            for session in trying.values():
                if session is not None:
                    session.hang_up("the launch has ended")
            threading.Event().wait(0.02)

    def close(self) -> None:
        """End the threads, and the connections that the caller has not taken."""
        self.settle()
        for session, _ in self.back.values():
            session.close(_END_GRACE_S)
        self._may_end.set()
        for thread in self._threads:
            thread.join()
