"""The launcher's process for one pod: makes the Job, accepts its pod, and relays.

    python -m trainwright.tasks.train.hosts.kubernetes.relay FOLDER

Only the pod with the token is accepted, over TLS with a certificate made for this one connection.
A guard, a process of its own, deletes the Job when this process has ended, however it ended.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from trainwright.tasks.errors import BadInput, NotInstalled, ServiceUnreachable, TrainwrightError
from trainwright.tasks.settings import Settings
from trainwright.tasks.train.hosts.host_engine import HostStanding
from trainwright.tasks.train.hosts.kubernetes import manifests
from trainwright.tasks.train.hosts.kubernetes.cluster_api import ClusterApi
from trainwright.tasks.train.hosts.kubernetes.cluster_login import ClusterLogin
from trainwright.tasks.train.hosts.kubernetes.dial_back import ACCEPTED
from trainwright.tasks.train.hosts.kubernetes.frames import Broken, Carrier, keep_alive
from trainwright.tasks.train.hosts.kubernetes.orders import RelayFolder, RelayOrder
from trainwright.tasks.train.hosts.kubernetes.pod_state import why_refused, why_waiting

_LOOK_S = 1.0
_HANDSHAKE_S = 10.0
_MOST_AT_ONCE = 16
_TOKEN_BYTES = 43  # token_urlsafe(32)
_DELETE_FOR_S, _TELL_AFTER_S = 60.0, 8.0
_DELETE_AGAIN_S = 30.0
"""A request to make the Job may be handled after one to delete it."""
_NO_RIGHT = (401, 403)
_KNOWN_WITHIN_S, _KNOWN_EVERY_S = 3.0, 0.2
"""A node reports the end of a pod a second or two after it."""


class Relay:
    """One host: a Job, and the connection of its pod."""

    def __init__(self, order: RelayOrder, folder: RelayFolder) -> None:
        self._order, self._folder, self.name = order, folder, order.name
        self._api = _api(order)
        self._token = secrets.token_urlsafe(32)
        self._accepted = queue.SimpleQueue[ssl.SSLSocket]()
        self._handshakes = threading.Semaphore(_MOST_AT_ONCE)
        self._telling, self._came = threading.Lock(), threading.Event()
        self._refused: TrainwrightError | None = None
        self._unanswered = False

    def run(self) -> None:
        """Ask for the pod, wait for it, and relay until it ends."""
        address = self._order.cluster.address or _route_to(*self._api.host)
        certificate, context = _certificate()
        with socket.create_server((address, 0), family=_family(address)) as listening:
            self._guard()
            self._create(address, listening.getsockname()[1], certificate)
            listening.settimeout(_LOOK_S)
            peer = self._wait(listening, context)
        with self._telling:
            self._came.set()
            self._folder.stand(HostStanding("granted"))
        try:
            Carrier(peer, 0, 1, "sink").run(sys.stdout.close)
        except Broken as error:
            raise ServiceUnreachable(self._why_lost(str(error)), service="kubernetes") from None

    def _guard(self) -> None:
        """Start the process that deletes the Job at our end, and outlives us for that."""
        words = [sys.executable, "-P", "-m", __spec__.name, "--delete", self._folder.path]
        self._pipe = subprocess.Popen(
            [str(one) for one in words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _create(self, address: str, port: int, certificate: bytes) -> None:
        pod = self._own_pod()
        files = manifests.secret_files(address, port, self._token, certificate)
        job = self._api.create("jobs", {**self._order.job, **_owned(self._order.job, pod)})
        self._api.create("secrets", manifests.secret(job, self._order.cluster, files))

    def _own_pod(self) -> manifests.ApiObject | None:
        """This process's pod, if it is one of the namespace: its end then ends the Job too."""
        return self._api.read("pods", socket.gethostname()) if self._api.in_pod else None

    def _wait(self, listening: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
        """The connection of the Job's pod. Raises BadInput or ServiceUnreachable if none comes."""
        # A thread of its own: a pod gives up if it is not accepted while the API is silent.
        threading.Thread(target=self._keep_looking, name="look", daemon=True).start()
        while self._refused is None:
            with contextlib.suppress(queue.Empty):
                return self._accepted.get_nowait()
            with contextlib.suppress(TimeoutError):
                plain, where = listening.accept()
                threading.Thread(
                    target=self._shake_hands, args=(plain, where[0], context), daemon=True
                ).start()
        raise self._refused

    def _keep_looking(self) -> None:
        """Tell what the pod waits for, until it has come or is refused."""
        while not self._came.is_set() and self._refused is None:
            try:
                pods = self._api.pods_of(self.name)
                self._refused, why = why_refused(pods), why_waiting(pods)
                self._unanswered = False
            except ServiceUnreachable as error:
                if error.details.get("status") in _NO_RIGHT:
                    self._refused = error
                    return
                # It may be restarting: the Job keeps its place, and `queue_timeout` limits this.
                why = "for its pod; the cluster's API does not answer"
                if not self._unanswered:
                    _say(str(error))
                self._unanswered = True
            except TrainwrightError as error:
                self._refused = error
                return
            with self._telling:
                if not self._came.is_set():
                    self._folder.stand(HostStanding("queued", why))
            self._came.wait(_LOOK_S)

    def _shake_hands(self, plain: socket.socket, where: str, context: ssl.SSLContext) -> None:
        """Accept a connection that knows the token; refuse any other in one line."""
        with self._handshakes:
            try:
                plain.settimeout(_HANDSHAKE_S)
                peer = context.wrap_socket(plain, server_side=True)
                said = b""
                while len(said) <= _TOKEN_BYTES and (piece := peer.recv(1)) not in (b"", b"\n"):
                    said += piece
                if not hmac.compare_digest(said, self._token.encode()):
                    raise OSError("wrong token")
                keep_alive(peer)
                peer.sendall(ACCEPTED)
                self._accepted.put(peer)
            except OSError as error:
                plain.close()
                _say(f"refused a connection from {where}: {error.strerror or error}")

    def _why_lost(self, why: str) -> str:
        """Why the connection ended, as the cluster knows it, soon after."""
        until = time.monotonic() + _KNOWN_WITHIN_S
        with contextlib.suppress(TrainwrightError):
            while True:
                pods = self._api.pods_of(self.name)
                if not pods:
                    return "its pod was deleted"
                if (known := why_refused(pods)) is not None:
                    return str(known)
                if time.monotonic() > until:
                    break
                time.sleep(_KNOWN_EVERY_S)
        return why


def _api(order: RelayOrder) -> ClusterApi:
    """The order's cluster, with the login in this process's environment."""
    login = ClusterLogin.of(Settings.from_environment())
    return ClusterApi(order.cluster.namespace, order.cluster.api, login)


def _owned(job: manifests.ApiObject, pod: manifests.ApiObject | None) -> manifests.ApiObject:
    """The Job's metadata with its owner, if there is one."""
    if pod is None:
        return {}
    owner = [manifests.reference("v1", "Pod", pod)]
    return {"metadata": {**job["metadata"], "ownerReferences": owner}}


def _certificate() -> tuple[bytes, ssl.SSLContext]:
    """A new certificate, and the context of the server that shows it."""
    try:
        from trainwright.tasks.train.hosts.kubernetes.certificate import self_signed
    except ImportError:
        raise NotInstalled(
            "kubernetes: the package cryptography is missing; install the extra "
            "`kubernetes` of trainwright (from its clone: pip install '.[kubernetes]')",
            service="cryptography",
        ) from None
    certificate, key = self_signed()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.NamedTemporaryFile() as file:  # mode 600; ssl reads only files
        file.write(certificate + key)
        file.flush()
        context.load_cert_chain(file.name)
    return certificate, context


def _route_to(host: str, port: int) -> str:
    """The address of this machine on the route to another."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # UDP: chooses a route, sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ServiceUnreachable(
            f"kubernetes: no route to its API at {host}: {error.strerror or error}",
            service="kubernetes",
        ) from None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _delete(folder: RelayFolder) -> None:
    """The guard: delete the Job when the relay has ended, and tell the engine."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    order = folder.order()
    sys.stdin.buffer.read()  # ends with the relay
    if not _delete_job(order, folder):
        time.sleep(_DELETE_AGAIN_S)
        _delete_job(order, folder)


def _delete_job(order: RelayOrder, folder: RelayFolder) -> bool:
    """Try for a minute, of which the engine waits a part. False if there was no such Job."""
    began = time.monotonic()
    while True:
        try:
            was_there = _api(order).delete_job(order.name)
        except TrainwrightError as error:
            tried_s = time.monotonic() - began
            if tried_s > _TELL_AFTER_S:
                folder.end()
            if tried_s > _DELETE_FOR_S:
                _say(f"the Job {order.name} is left, and removed after its end: {error}")
                return True
            time.sleep(_LOOK_S)
        else:
            folder.end()
            return was_there


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - the host's log


def main() -> int:
    """The program: its last line on standard error says why it ended."""
    if sys.argv[1] == "--delete":
        _delete(RelayFolder(Path(sys.argv[2])))
        return 0
    folder = RelayFolder(Path(sys.argv[1]))
    try:
        Relay(folder.order(), folder).run()
    except (TrainwrightError, OSError) as error:
        folder.refuse(isinstance(error, BadInput))
        _say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
