"""The embedded S3 server: starts once, keeps data and keys, accepts only its keys."""

from __future__ import annotations

import contextlib
import http.client
import io
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import urllib3
from minio import Minio
from minio.error import MinioException

from trainwright.infra.background_process import stop
from trainwright.infra.s3_server import (
    S3Access,
    inner_sockets,
    s3_access,
    s3_answers,
    s3_service,
    start_s3,
    stop_s3,
)


def client(access: S3Access) -> Minio:
    pool = urllib3.PoolManager(timeout=urllib3.Timeout(20), retries=False)
    return Minio(
        access.endpoint.removeprefix("http://"),
        access_key=access.access_key,
        secret_key=access.secret_key,
        secure=False,
        region="us-east-1",
        http_client=pool,
    )


def store(access: S3Access, key: str, data: bytes) -> None:
    if not client(access).bucket_exists("bucket"):
        client(access).make_bucket("bucket")
    client(access).put_object("bucket", key, io.BytesIO(data), len(data))


def load(access: S3Access, key: str) -> bytes:
    response = client(access).get_object("bucket", key)
    try:
        return response.read()
    finally:
        response.close()
        response.release_conn()


def piece_sizes(home: Path) -> list[int]:
    """The sizes of the pieces of objects on disk, from the indexes of SeaweedFS's volumes.

    An entry is an id (8 bytes), an offset (5) and a size (4).
    """
    indexes = [path.read_bytes() for path in (home / "s3" / "data").glob("bucket_*.idx")]
    return [
        struct.unpack(">8x5xi", index[at : at + 17])[0]
        for index in indexes
        for at in range(0, len(index), 17)
    ]


def listening(pid: int) -> dict[int, str]:
    """The TCP ports on which a process listens, with the kernel's hexadecimal address."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed after the folder was listed
            inodes.add(link.readlink().as_posix())
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                found[int(port, 16)] = address
    return found


@pytest.fixture(scope="module")
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("s3") / ("deep-" * 25)  # longer than a socket's path may be
    start_s3(home)
    yield home
    stop([s3_service(home)], grace_s=0)


def test_no_access_before_the_first_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        s3_access(tmp_path)
    assert not s3_answers(tmp_path)
    stop_s3(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_concurrent_starts_keep_one_running_server(own_home: Path) -> None:
    pid = s3_service(own_home).pid()
    code = (
        "import sys; from pathlib import Path; from trainwright.infra.s3_server import start_s3; "
        "start_s3(Path(sys.argv[1]))"
    )
    starters = [subprocess.Popen([sys.executable, "-c", code, str(own_home)]) for _ in range(3)]
    assert [starter.wait(60) for starter in starters] == [0, 0, 0]
    assert s3_service(own_home).pid() == pid
    assert len(s3_service(own_home).processes()) == 1


def test_every_port_is_on_the_loopback_address_only(own_home: Path) -> None:
    pid = s3_service(own_home).pid()
    assert pid is not None
    ports = listening(pid)
    assert s3_access(own_home).port in ports
    assert len(ports) == 8
    assert set(ports.values()) == {"0100007F"}


def test_no_port_reads_or_writes_data_without_the_keys(own_home: Path) -> None:
    access = s3_access(own_home)
    store(access, "secret.txt", b"the-secret-content")
    pid = s3_service(own_home).pid()
    assert pid is not None
    requests = [
        ("GET", "/bucket/secret.txt"),
        ("GET", "/buckets/bucket/secret.txt"),
        ("GET", "/col/delete?collection=bucket"),
        ("GET", "/dir/assign"),
        ("GET", "/vol/grow?count=1"),
        ("DELETE", "/buckets/bucket/secret.txt"),
        ("DELETE", "/bucket/secret.txt"),
        ("PUT", "/bucket/other.txt"),
        ("POST", "/buckets/bucket/other.txt"),
        *(("GET", f"/{volume},01000000000") for volume in range(1, 8)),
    ]
    for port in listening(pid):
        for method, path in requests:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
            try:
                connection.request(method, path, body=b"x" if method in ("PUT", "POST") else None)
                response = connection.getresponse()
                assert response.status >= 400, (port, method, path)
                assert b"the-secret-content" not in response.read()
            except (http.client.HTTPException, OSError):
                continue  # a gRPC port closes the connection
            finally:
                connection.close()
    assert load(access, "secret.txt") == b"the-secret-content"
    assert [item.object_name for item in client(access).list_objects("bucket")] == ["secret.txt"]


def test_a_multipart_object_can_be_read_in_whole_and_in_part(own_home: Path) -> None:
    access, data = s3_access(own_home), random.Random(0).randbytes((5 << 20) + 3)
    store(access, "large", data)
    sizes = piece_sizes(own_home)
    assert len([size for size in sizes if size >= 1 << 20]) == 5
    assert max(sizes) < (1 << 20) + 100  # plus SeaweedFS's metadata of a piece
    assert load(access, "large") == data
    begin, length = (2 << 20) - 7, (1 << 20) + 14
    response = client(access).get_object("bucket", "large", offset=begin, length=length)
    try:
        assert response.read() == data[begin : begin + length]
    finally:
        response.close()
        response.release_conn()


def test_grpc_ports_require_the_servers_certificate(own_home: Path, tmp_path: Path) -> None:
    port = s3_access(own_home).port
    weed = str(Path(sys.executable).parent / "weed")
    command = [
        weed,
        "shell",
        f"-master=127.0.0.1:{port + 1}.{port + 5}",
        f"-filer=127.0.0.1:{port + 3}.{port + 7}",
    ]

    def listed(folder: Path, timeout_s: float) -> str:
        with subprocess.Popen(
            command,
            cwd=folder,
            env={"HOME": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as shell:
            try:
                return shell.communicate("fs.ls /buckets\nexit\n", timeout=timeout_s)[0]
            except subprocess.TimeoutExpired:
                shell.kill()
                return shell.communicate()[0]

    store(s3_access(own_home), "seen.txt", b"x")
    assert "bucket" in listed(own_home / "s3", 60)
    assert "bucket" not in listed(tmp_path, 5)  # the client retries for ever


def test_secrets_are_only_in_private_files(own_home: Path) -> None:
    access, service = s3_access(own_home), s3_service(own_home)
    pid = service.pid()
    assert pid is not None
    assert (own_home / "s3").stat().st_mode & 0o777 == 0o700
    for name in ("access.json", "security.toml", "inner.key"):
        assert (own_home / "s3" / name).stat().st_mode & 0o777 == 0o600
    for text in (service.log.read_text(), repr(access), " ".join(psutil.Process(pid).cmdline())):
        assert access.secret_key not in text


def test_acknowledged_objects_survive_kill_9_under_load(own_home: Path) -> None:
    access = s3_access(own_home)
    store(access, "first", b"0")
    pid = s3_service(own_home).pid()
    assert pid is not None
    acknowledged: dict[str, bytes] = {}

    server = psutil.Process(pid)

    def write(writer: int) -> None:
        for number in range(1000):
            key, data = f"load/{writer}-{number}", f"{writer}-{number}-".encode() * 500
            try:
                client(access).put_object("bucket", key, io.BytesIO(data), len(data))
            except (MinioException, urllib3.exceptions.HTTPError, OSError):  # the server died
                return
            acknowledged[key] = data
            if len(acknowledged) == 60:
                server.kill()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert len(acknowledged) >= 60
    psutil.wait_procs([server], timeout=10)
    assert s3_service(own_home).pid() is None
    again = start_s3(own_home)
    assert (again.access_key, again.secret_key) == (access.access_key, access.secret_key)
    assert {key: load(again, key) for key in acknowledged} == acknowledged


def test_data_and_keys_survive_a_stop_and_an_occupied_port_is_avoided(own_home: Path) -> None:
    before = start_s3(own_home)
    store(before, "kept", b"kept")
    assert any(socket.exists() for socket in inner_sockets(before.port))
    stop_s3(own_home)
    assert not any(socket.exists() for socket in inner_sockets(before.port))
    assert s3_service(own_home).processes() == []
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", before.port + 7))
        other.listen()
        after = start_s3(own_home)
    assert after.port != before.port
    assert load(after, "kept") == b"kept"
