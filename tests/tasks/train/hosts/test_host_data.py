"""Staging data on the hosts of a lab: missing data is copied once, and failures name the host."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import doors
import pytest
from hosts_case import act, on_hosts, until
from lab import Lab
from training_case import once

from trainwright.infra.s3_server import S3Access
from trainwright.tasks.errors import BadInput, Interrupted, ServiceUnreachable
from trainwright.tasks.storage.connect import open_store
from trainwright.tasks.train import TrainRequest, train


def table(path: Path, rows: int = 400) -> str:
    """Write a csv file with two classes."""
    lines = [
        f"{n % 7},{n % 11},{'long' * 50 if n == 0 else n % 13},{'yes' if n % 7 > 3 else 'no'}"
        for n in range(1, rows)
    ]
    path.write_text("\n".join(["a,b,c,label", *lines]) + "\n")
    return str(path)


def images(folder: Path) -> str:
    """Write a folder of images with two classes."""
    import numpy as np
    from PIL import Image

    (folder / "sub").mkdir(parents=True)
    rows = ["file,label"]
    for n in range(120):
        name = f"sub/{n}.png"
        Image.fromarray(np.full((1, 3), n * 2, dtype=np.uint8)).save(folder / name)
        rows.append(f"{name},{'yes' if n > 60 else 'no'}")
    (folder / "index.csv").write_text("\n".join(rows) + "\n")
    return str(folder)


LINEAR = """import torch


def build_model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2))
"""


def with_data(asked: TrainRequest, uri: str) -> TrainRequest:
    """A training of a linear model on a table."""
    from trainwright.tasks.data import dataset
    from trainwright.tasks.data.sources import localized

    (Path(asked.source_folder) / "net.py").write_text(LINEAR)
    assert asked.job.model is not None
    spec = asked.job.data.model_copy(update={"uri": uri})
    model = asked.job.model.model_copy(update={"config": {}})
    job = asked.job.model_copy(update={"data": spec, "model": model})
    schema = dataset.describe(localized(spec, doors.settings()))
    return asked.model_copy(update={"job": job, "schema_": schema})


def test_a_stop_interrupts_the_staging_of_data(tmp_path: Path, lab: Callable[..., Lab]) -> None:
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20])
    act(made, 1, "train.hosts.stage_data", "exec sleep 600")
    stop = threading.Event()
    watcher = once(lambda: any("sleep" in line for line in made.hosts[1].words()), stop.set)
    with pytest.raises(Interrupted, match="stopped before the first step"):
        train(asked, stop=stop)
    watcher.join()
    assert until(lambda: [host.words() for host in made.hosts] == [[], []])


@pytest.mark.parametrize("make", [table, pytest.param(images, marks=pytest.mark.slow)])
def test_data_that_hosts_lack_is_copied_there_once(
    make: Callable[[Path], str],
    tmp_path: Path,
    lab: Callable[..., Lab],
    heard: list[dict[str, Any]],
) -> None:
    made = lab(cores=[None, None])
    uri = make(made.private / "table.csv")  # on this machine; each host has its own folder here
    asked = with_data(on_hosts(tmp_path, made, [40, 20]), uri)
    train(asked)
    copied = {
        (one["host"], one["bytes"] == one["of"]) for one in heard if one["event"] == "preload"
    }
    assert {("h1", True), ("h2", True)} <= copied
    heard.clear()
    train(asked.model_copy(update={"resume": False}))
    assert not [one for one in heard if one["event"] == "preload"]


def test_missing_data_is_reported_with_host_and_uri(
    tmp_path: Path, lab: Callable[..., Lab]
) -> None:
    made = lab(cores=[None, None], private_size="512k")
    uri = table(made.private / "table.csv", rows=9000)
    asked = with_data(on_hosts(tmp_path, made, [40, 20]), uri)
    fill = f"head -c 460k /dev/zero > {made.private}/full"
    subprocess.run(made.hosts[1].inside("sh", "-c", fill), check=True)
    with pytest.raises(BadInput, match=rf"{uri} is missing.*host h2 \(.*No space left"):
        train(asked)
    assert until(lambda: [host.words() for host in made.hosts] == [[], []])


class Doorkeeper(socketserver.ThreadingTCPServer):
    """Forwards connections from these addresses to another server, and closes all others."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, address: str, target: tuple[str, int], welcome: set[str]) -> None:
        self.target, self.welcome = target, welcome
        super().__init__((address, 0), Passage)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return client_address[0] in self.welcome


class Passage(socketserver.BaseRequestHandler):
    server: Doorkeeper

    def handle(self) -> None:
        with socket.create_connection(self.server.target) as behind:
            back = threading.Thread(target=self._pump, args=(behind, self.request), daemon=True)
            back.start()
            self._pump(self.request, behind)
            back.join()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@pytest.mark.slow
def test_hosts_fetch_data_from_s3_and_a_host_without_access_is_named(
    tmp_path: Path, lab: Callable[..., Lab], s3: S3Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lab(cores=[None, None])
    first, second = (host.address for host in made.hosts)
    target = ("127.0.0.1", urlsplit(s3.endpoint).port or 0)
    open_store("s3://hosts", doors.settings()).put_file(
        "data/table.csv", Path(table(tmp_path / "table.csv"))
    )
    with Doorkeeper(made.driver, target, {made.driver, first, second}) as door:
        threading.Thread(target=door.serve_forever, daemon=True).start()
        monkeypatch.setenv(
            "TRAINWRIGHT_S3_ENDPOINT", f"http://{made.driver}:{door.server_address[1]}"
        )
        asked = with_data(on_hosts(tmp_path, made, [40, 20]), "s3://hosts/data/table.csv")
        train(asked)
        open_store("s3://hosts", doors.settings()).put_file(
            "data/table.csv", Path(table(tmp_path / "table.csv", rows=500))
        )
        asked = with_data(asked, "s3://hosts/data/table.csv")
        door.welcome.remove(second)
        with pytest.raises(
            ServiceUnreachable,
            match=r"host h2 \(.*\): s3://hosts/data/table.csv is missing on that host: ",
        ):
            train(asked.model_copy(update={"resume": False}))
        door.shutdown()
    for path in (*tmp_path.rglob("*"), *made.folder.rglob("*")):
        if path.is_file():
            assert s3.secret_key.encode() not in path.read_bytes()
