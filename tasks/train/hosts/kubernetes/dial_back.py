"""Runs in a pod: connects to the launcher, proves that it knows the token, and runs a process.

    python -m trainwright.tasks.train.hosts.kubernetes.dial_back FOLDER WORD ...

FOLDER has the pod's Secret: the launcher's address, the token, and the certificate that the
launcher must show. The process's standard input and output are the connection, with which it
ends. The process gets the signal to end that an evicted pod gets: the agent tells the launcher,
which then has a last checkpoint made, and ends the connection.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

from trainwright.infra.process import dying_with_parent
from trainwright.tasks.train.hosts.kubernetes.frames import Broken, Carrier, keep_alive
from trainwright.tasks.train.hosts.versions import CAME_BY

ADDRESS_FILE, TOKEN_FILE, CERTIFICATE_FILE = "launcher.json", "token", "certificate.pem"
ACCEPTED = b"accepted\n"
_CONNECT_TIMEOUT_S, _TRY_FOR_S, _TRY_EVERY_S = 10.0, 30.0, 1.0
_END_GRACE_S = 20.0
_SECRET_WITHIN_S = 150.0
"""A node looks for a Secret that it has not found every 60 to 90 s."""


def connect(folder: Path) -> ssl.SSLSocket:
    """A connection that the launcher has accepted. Raises OSError."""
    until = time.monotonic() + _SECRET_WITHIN_S
    while not (folder / ADDRESS_FILE).exists():
        if time.monotonic() > until:
            raise OSError(f"no Secret of a launcher in {_SECRET_WITHIN_S:g} s")
        time.sleep(_TRY_EVERY_S)
    place = json.loads((folder / ADDRESS_FILE).read_text())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # only the launcher has this very certificate's key
    context.load_verify_locations(folder / CERTIFICATE_FILE)
    until = time.monotonic() + _TRY_FOR_S
    while True:
        try:
            plain = socket.create_connection(
                (place["address"], place["port"]), timeout=_CONNECT_TIMEOUT_S
            )
            break
        except OSError as error:
            if time.monotonic() > until:
                raise OSError(
                    f"can't connect to the launcher at {place['address']}, port {place['port']}: "
                    f"{error.strerror or error}"
                ) from None
            time.sleep(_TRY_EVERY_S)
    keep_alive(plain)
    peer = context.wrap_socket(plain)
    peer.sendall((folder / TOKEN_FILE).read_bytes().strip() + b"\n")
    answer = b""
    while not answer.endswith(b"\n") and (piece := peer.recv(1)):
        answer += piece
    if answer != ACCEPTED:
        raise OSError(f"the launcher at {place['address']} refuses this pod: its token is another")
    return peer


def run(peer: ssl.SSLSocket, words: list[str]) -> int:
    """Run a process on the connection, until either ends; its exit code."""
    launcher, own = peer.getpeername(), peer.getsockname()
    came_by = f"{launcher[0]} {launcher[1]} {own[0]} {own[1]}"
    process = subprocess.Popen(
        dying_with_parent(words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, CAME_BY: came_by},
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    carrier = Carrier(peer, process.stdout.fileno(), process.stdin.fileno(), "source")
    signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
    try:
        carrier.run(process.stdin.close)
    except Broken as error:
        print(error, file=sys.stderr)  # noqa: T201 - the pod's log
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        return process.wait(_END_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def main() -> int:
    """The program."""
    try:
        peer = connect(Path(sys.argv[1]))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)  # noqa: T201 - the pod's log, which its status shows
        return 4
    return run(peer, sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
