"""Objects under keys: a folder and a real S3 server behave the same."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import doors
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.infra.background_process import stop
from trainwright.infra.s3_server import S3Access, s3_service, start_s3
from trainwright.tasks import progress
from trainwright.tasks.errors import BadInput, CorruptArtefact, ServiceUnreachable
from trainwright.tasks.storage.connect import open_store
from trainwright.tasks.storage.objects import ObjectStore, checked_key, get_verified, sha256
from trainwright.tasks.storage.s3 import S3Store


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty store of each kind."""
    if request.param == "folder":
        return open_store((tmp_path / "objects").as_uri(), doors.settings())
    request.getfixturevalue("s3")
    return open_store(f"s3://objects/{sha256(str(tmp_path).encode())[:16]}", doors.settings())


def keys(store: ObjectStore, prefix: str = "") -> list[str]:
    return [item.key for item in store.list(prefix)]


def test_get_returns_what_put_stored_and_a_second_put_replaces_it(store: ObjectStore) -> None:
    for data in (b"", b"one", bytes(range(256)) * 40_000):
        store.put("a/b.bin", data)
        assert store.get("a/b.bin") == data


def test_a_new_stores_folder_or_bucket_is_missing_until_the_first_write(
    tmp_path: Path, s3: S3Access
) -> None:
    bucket = f"b-{sha256(str(tmp_path).encode())[:16]}"
    heard: list[dict[str, Any]] = []
    for uri, what in (
        ((tmp_path / "objects").as_uri(), f"folder {tmp_path}/objects"),
        (f"s3://{bucket}/x", f"bucket {bucket}"),
    ):
        store = open_store(uri, doors.settings())
        missing = store.missing()
        assert missing is not None
        assert what in missing
        assert keys(store) == []
        with progress.listening(heard.append):
            store.put("a", b"")
        assert store.missing() is None
    said = [f"there was no bucket {bucket} at {s3.endpoint}; it is made"]
    assert [one["message"] for one in heard] == said


def test_a_file_survives_upload_and_download(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "here").write_bytes(b"content" * 1_000_000)
    store.put_file("a/file", tmp_path / "here")
    store.get_file("a/file", tmp_path / "deep" / "there")
    assert (tmp_path / "deep" / "there").read_bytes() == b"content" * 1_000_000


def test_a_missing_key_raises_file_not_found(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        store.get("nothing")
    with pytest.raises(FileNotFoundError):
        store.get_file("nothing", tmp_path / "file")
    store.put("some/thing", b"x")
    with pytest.raises(FileNotFoundError):
        store.get("some/other")


def test_delete_removes_an_object_and_ignores_a_missing_one(store: ObjectStore) -> None:
    for name in "abcd":
        store.put(name, b"1")
    store.delete("a")
    store.delete("a")
    store.delete("a", "b", "d")
    store.delete()
    assert keys(store) == ["c"]


def test_list_gives_keys_below_a_prefix_in_order_with_their_sizes(store: ObjectStore) -> None:
    assert keys(store) == []
    for key in ("runs/b/1", "runs/a/2", "runs/a/10", "runs/ab", "x"):
        store.put(key, key.encode())
    assert keys(store) == ["runs/a/10", "runs/a/2", "runs/ab", "runs/b/1", "x"]
    assert keys(store, "runs/a") == ["runs/a/10", "runs/a/2", "runs/ab"]
    assert keys(store, "runs/a/") == ["runs/a/10", "runs/a/2"]
    assert keys(store, "none/") == []
    assert [item.size for item in store.list("runs/a/")] == [9, 8]


def test_folders_are_the_names_directly_below(store: ObjectStore) -> None:
    for key in ("runs/b/1", "runs/a/2/deep", "runs/file", "x"):
        store.put(key, b"")
    assert list(store.folders()) == ["runs"]
    assert list(store.folders("runs/")) == ["a", "b"]
    assert list(store.folders("none/")) == []


def test_swap_writes_only_over_the_expected_version(store: ObjectStore) -> None:
    def current() -> str:
        return store.get_versioned("swapped")[1]

    assert not store.swap("swapped", b"x", "0123456789abcdef0123456789abcdef")  # it does not exist
    first = store.swap("swapped", b"first", None)
    assert first == current()
    assert not store.swap("swapped", b"x", None)
    assert store.swap("swapped", b"second", first) == current()
    assert not store.swap("swapped", b"x", first)
    store.put("swapped", b"third")
    assert current() != first
    assert store.get("swapped") == b"third"


def test_one_of_many_concurrent_swaps_succeeds(store: ObjectStore) -> None:
    store.put("raced", b"before")
    _, version = store.get_versioned("raced")
    with ThreadPoolExecutor(8) as pool:
        marks = list(
            pool.map(lambda n: store.swap("raced", f"writer {n}".encode(), version), range(8))
        )
    winners = [number for number, mark in enumerate(marks) if mark is not None]
    assert len(winners) == 1
    assert store.get("raced") == f"writer {winners[0]}".encode()


def test_one_of_many_concurrent_creates_succeeds_and_its_content_stays(
    store: ObjectStore,
) -> None:
    store.put("first", b"")
    with ThreadPoolExecutor(8) as pool:
        for round_ in range(5):
            key = f"locks/{round_}"
            won = list(pool.map(lambda n, key=key: store.create(key, str(n).encode()), range(8)))  # type: ignore[misc]
            assert sum(won) == 1
            assert store.get(key) == str(won.index(True)).encode()
            assert not store.create(key, b"late")


@pytest.mark.parametrize(
    "key",
    ["", "/a", "a/", "a//b", "../a", "a/../b", "a/..", ".", "a/./b", "a b", "a\n", "a\\b", "é"],
)
def test_keys_other_than_plain_relative_paths_are_bad_input(store: ObjectStore, key: str) -> None:
    for call in (
        store.get,
        store.delete,
        lambda key: store.put(key, b""),
        lambda key: store.create(key, b""),
    ):
        with pytest.raises(BadInput, match="key: got"):
            call(key)


@given(st.text(max_size=20))
def test_an_accepted_key_stays_below_the_root(key: str) -> None:
    try:
        checked_key(key)
    except BadInput:
        return
    root = Path("/root/of/all")
    assert (root / key).resolve().is_relative_to(root)
    assert key == key.strip()


def test_a_verified_read_refuses_a_changed_or_missing_object(store: ObjectStore) -> None:
    store.put("model", b"weights")
    assert get_verified(store, "model", sha256(b"weights")) == b"weights"
    with pytest.raises(CorruptArtefact, match=r"model: changed since it was written"):
        get_verified(store, "model", sha256(b"other"))
    with pytest.raises(CorruptArtefact, match="gone: missing"):
        get_verified(store, "gone", sha256(b""))


def test_a_folder_hides_partly_written_files(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri(), doors.settings())
    store.put("a/b", b"whole")
    (tmp_path / "a" / ".part-123").write_bytes(b"ha")
    assert keys(store) == ["a/b"]


def test_the_sdks_public_put_object_overwrites_in_spite_of_if_none_match(s3: S3Access) -> None:
    """This is why `S3Store.create` sends the header itself. If this fails, the SDK sends it."""
    store = open_store("s3://objects/trap", doors.settings())
    assert isinstance(store, S3Store)
    store.put("key", b"first")
    store.client.put_object(
        "objects", "trap/key", io.BytesIO(b"2nd"), 3, metadata={"If-None-Match": "*"}
    )
    assert store.get("key") == b"2nd"
    assert not store.create("key", b"third")
    assert store.get("key") == b"2nd"


class RecordingServer(BaseHTTPRequestHandler):
    """Accepts every request, and records digest and body of each PUT."""

    received: ClassVar[list[tuple[str, bytes]]] = []

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_PUT(self) -> None:
        self.received.append(
            (
                self.headers["x-amz-content-sha256"],
                self.rfile.read(int(self.headers["Content-Length"])),
            )
        )
        self.send_response(200)
        self.send_header("ETag", '"mark"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        kept = (
            b"<Error><Key>b</Key><Code>AccessDenied</Code><Message>kept for good</Message></Error>"
        )
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<DeleteResult>" + kept + b"</DeleteResult>")

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def recording_store() -> Iterator[S3Store]:
    """A store whose server is `RecordingServer`."""
    with HTTPServer(("127.0.0.1", 0), RecordingServer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield S3Store(
                "bucket", "", f"http://127.0.0.1:{server.server_port}", "key", "secret", "us-east-1"
            )
        finally:
            server.shutdown()
            thread.join()


def test_an_s3_request_has_the_callers_digest_or_a_computed_one(
    recording_store: S3Store,
) -> None:
    RecordingServer.received.clear()
    assert recording_store.swap("a", memoryview(b"data"), None, "5" * 64) == '"mark"'
    assert recording_store.create("a", b"", "6" * 64)
    assert recording_store.create("a", b"data")
    assert recording_store.swap("a", b"data", '"mark"') == '"mark"'
    right = sha256(b"data")
    assert RecordingServer.received == [
        ("5" * 64, b"data"),
        ("6" * 64, b""),
        (right, b"data"),
        (right, b"data"),
    ]


def test_an_object_that_an_s3_server_refuses_to_delete_is_named(recording_store: S3Store) -> None:
    assert_unreachable(
        lambda: recording_store.delete("a", "b"),
        "bucket/b can't be deleted: AccessDenied: kept for good",
    )


def test_the_embedded_server_accepts_the_callers_digest(s3: S3Access) -> None:
    store = open_store("s3://objects/known", doors.settings())
    for key, data in (("empty", b""), ("large", b"data" * 1_000_000)):
        assert store.create(key, data, sha256(data))
        assert store.get(key) == data


def each_call(store: ObjectStore) -> list[Callable[[], object]]:
    return [
        lambda: store.get("key"),
        lambda: store.put("key", b""),
        lambda: store.create("key", b""),
        lambda: store.delete("key"),
        lambda: store.delete("key", "other"),
        lambda: list(store.list()),
        lambda: list(store.folders()),
    ]


def assert_unreachable(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ServiceUnreachable, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert "very-secret" not in str(caught.value) + str(caught.value.document())
    assert caught.value.exit_code == 4


def test_wrong_credentials_give_one_line_without_the_secret(
    s3: S3Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store("s3://objects", doors.settings()).put("key", b"1")
    for access, secret in ((s3.access_key, "very-secret"), ("someone", "very-secret")):
        monkeypatch.setenv("TRAINWRIGHT_S3_ACCESS_KEY", access)
        monkeypatch.setenv("TRAINWRIGHT_S3_SECRET_KEY", secret)
        for call in each_call(open_store("s3://objects", doors.settings())):
            assert_unreachable(call, "refused the credentials")


def test_a_stopped_server_gives_one_line_that_says_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINWRIGHT_S3_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("TRAINWRIGHT_S3_ACCESS_KEY", "someone")
    monkeypatch.setenv("TRAINWRIGHT_S3_SECRET_KEY", "very-secret")
    for call in each_call(open_store("s3://objects", doors.settings())):
        assert_unreachable(
            call,
            "http://127.0.0.1:9 can't be reached; start the embedded one with `trainwright up`",
        )


def test_a_server_that_dies_between_two_calls_is_unreachable_and_serves_again_when_restarted(
    home: Path,
) -> None:
    start_s3(home)
    store = open_store("s3://objects", doors.settings())
    store.put("key", b"kept")
    stop([s3_service(home)], grace_s=0)
    for call in each_call(store):
        assert_unreachable(call, "can't be reached")
    start_s3(home)
    assert open_store("s3://objects", doors.settings()).get("key") == b"kept"


def test_without_a_server_the_error_says_how_to_set_one_up(home: Path) -> None:
    assert_unreachable(
        lambda: open_store("s3://objects", doors.settings()),
        "none is set up on this machine; start .* `trainwright up`",
    )


def test_the_embedded_servers_keys_are_not_shown_to_another_server(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINWRIGHT_S3_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(BadInput, match="TRAINWRIGHT_S3_ACCESS_KEY"):
        open_store("s3://objects", doors.settings())


@pytest.mark.parametrize(
    "uri", ["", "objects", "http://x/y", "s3://", "s3://UPPER/x", "s3://b/../x", "file://host/x"]
)
def test_an_invalid_store_uri_is_bad_input(home: Path, uri: str) -> None:
    with pytest.raises(BadInput, match="got"):
        open_store(uri, doors.settings())


def test_a_file_as_a_store_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for uri in ((tmp_path / "file").as_uri(), (tmp_path / "file" / "below").as_uri()):
        with pytest.raises(BadInput, match=r"file is a file; allowed: a folder"):
            open_store(uri, doors.settings())
