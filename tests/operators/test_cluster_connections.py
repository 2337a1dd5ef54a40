"""Airflow's connections to Slurm and Kubernetes. The API server is a fake, by https."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_cluster
import pytest
from airflow.sdk import Connection
from airflow.sdk.log import redact
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from doc_pages import DOCS, example
from slurm_lab import SlurmLab
from training_case import planned

from trainwright.dags import __main__ as dag_program
from trainwright.infra.process import dying_with_parent
from trainwright.operators import TrainOperator
from trainwright.operators.cluster_hooks import KubernetesHook, SlurmHook
from trainwright.operators.hooks import connection_ids, settings_of
from trainwright.tasks.cli import airflow_run
from trainwright.tasks.errors import BadInput, ServiceUnreachable
from trainwright.tasks.spec.host_spec import Host
from trainwright.tasks.spec.kubernetes_spec import Kubernetes
from trainwright.tasks.train.hosts.host_engine import HostRequest
from trainwright.tasks.train.hosts.kubernetes.cluster_api import ClusterApi
from trainwright.tasks.train.hosts.kubernetes.cluster_login import ClusterLogin
from trainwright.tasks.train.hosts.kubernetes.kubernetes_engine import KubernetesEngine

TOKEN = "a-token-of-the-cluster"


def connect(monkeypatch: pytest.MonkeyPatch, kind: str, **fields: Any) -> None:
    """Give Airflow a connection `mine`."""
    given = {"conn_type": f"trainwright_{kind}", **fields}
    monkeypatch.setenv("AIRFLOW_CONN_MINE", json.dumps(given))


def certificate(file: Path) -> Path:
    """A certificate of 127.0.0.1 that signs itself, with its key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fake API server")])
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    file.write_bytes(signed.public_bytes(serialization.Encoding.PEM) + private)
    return file


def test_a_relay_logs_in_by_the_connection_whose_token_is_in_no_file_and_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = certificate(tmp_path / "server.pem")
    with fake_cluster.running(tmp_path / "cluster", certificate=ca) as cluster:
        extra = {"ca": str(ca), "namespace": "lab"}
        connect(monkeypatch, "kubernetes", host=cluster.url, password=TOKEN, extra=extra)
        connected, said = KubernetesHook("mine").test_connection()
        assert (connected, said) == (
            True,
            "the API server answers; pods of namespace lab can be read",
        )
        settings = settings_of({"kubernetes_conn_id": "mine"})
        engine = KubernetesEngine(Kubernetes(image="train:1", address="127.0.0.1"), settings)
        host = Host.model_validate({"name": "h1", "address": "h1", "devices": [{"type": "cpu"}]})
        devices = tuple(planned([{"type": "cpu", "cores": 0.5}], [1]).devices)
        words = engine.command(HostRequest(host, devices, sys.executable), ["cat"])
        folder = Path(words[-1]).parent
        written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
        environment = settings.environment() | engine.variables
        done = subprocess.run(
            dying_with_parent(words),
            input=b"hello",
            capture_output=True,
            env=environment,
            check=False,
        )
        engine.close()
        assert (done.returncode, done.stdout) == (0, b"hello"), done.stderr
        assert cluster.logins == {f"Bearer {TOKEN}"}
        assert cluster.jobs == {}
        assert TOKEN not in " ".join(words) + written.decode() + done.stderr.decode()
        assert TOKEN not in json.dumps(cluster.created) + repr(settings)
        assert TOKEN not in str(redact(f"login with {TOKEN}"))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "connection mine: it has no API server and no token; fill them in"),
        ({"host": "http://a:1", "password": "t"}, r"API server: got 'http://a:1'; allowed: https:"),
        ({"host": "https://u:secret@a", "password": "t"}, "got 'https://…@a'; .* without user"),
        ({"host": "https://a"}, "connection mine: the token is empty or has spaces"),
    ],
)
def test_a_wrong_kubernetes_connection_is_told_in_one_line(
    fields: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(monkeypatch, "kubernetes", **fields)
    with pytest.raises(BadInput, match=why) as error:
        settings_of({"kubernetes_conn_id": "mine"})
    assert not re.search("secret|\\n", str(error.value))
    assert not KubernetesHook("mine").test_connection()[0]


def test_a_ca_file_that_is_missing_or_empty_and_a_wrong_namespace_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.pem").touch()
    for extra, why in (
        ({"ca": "/none.pem"}, "kubernetes: CA file: got /none.pem: No such file or directory"),
        ({"ca": str(tmp_path / "empty.pem")}, "kubernetes: CA file: got .*; allowed: a PEM file"),
        ({"namespace": "A b"}, "KUBERNETES_NAMESPACE: namespace: got 'A b'"),
    ):
        connect(monkeypatch, "kubernetes", host="https://a", password="t", extra=extra)
        with pytest.raises(BadInput, match=why):
            KubernetesEngine(
                Kubernetes(image="train:1"), settings_of({"kubernetes_conn_id": "mine"})
            )


def test_an_api_server_that_does_not_answer_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, "kubernetes", host="https://127.0.0.1:9", password=TOKEN)
    api = KubernetesHook("mine").get_conn()
    assert isinstance(api, ClusterApi)
    with pytest.raises(
        ServiceUnreachable, match=r"its API at https://127.0.0.1:9 can't be reached"
    ):
        api.pods_of("x")
    assert TOKEN not in KubernetesHook("mine").test_connection()[1]


def test_a_slurm_connection_gives_options_and_replaces_all_of_its_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect(monkeypatch, "slurm", extra={"account": "physics", "partition": "gpu,long"})
    monkeypatch.setenv("TRAINWRIGHT_SLURM_QOS", "of-the-environment")
    settings = TrainOperator(task_id="train", run="x", slurm_conn_id="mine").settings()
    assert settings.slurm_options() == {"account": "physics", "partition": "gpu,long"}
    with pytest.raises(BadInput, match=r"connection mine: account: got '-x'; allowed: 1 to 128"):
        SlurmHook.variables(Connection(conn_id="mine"), {"account": "-x"})


def test_a_wrong_configured_connection_ends_a_run_with_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    connect(monkeypatch, "slurm", extra={"account": "-x"})
    monkeypatch.setenv("AIRFLOW__TRAINWRIGHT__SLURM_CONN_ID", "mine")
    assert dag_program.main() == BadInput.exit_code
    (tmp_path / "airflow.log").write_text(f"a line of Airflow's\n{capsys.readouterr().out}")
    error = airflow_run.before_the_first_task(tmp_path / "airflow.log")
    assert isinstance(error, BadInput)
    assert str(error).startswith("connection mine: account: got '-x'; allowed: 1 to 128")
    for other in ("", "a line of Airflow's", "[1]", '{"error": 1}'):
        (tmp_path / "airflow.log").write_text(other)
        assert airflow_run.before_the_first_task(tmp_path / "airflow.log") is None


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_the_manuals_connections_are_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = example(DOCS / "how-to" / f"{kind}.md", "commands")
    given = dict(re.findall(r"export (\w+)='?(.*?)'?(?: +#.*)?$", block, re.MULTILINE))
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    field = f"{kind}_conn_id"
    assert connection_ids()[field] == given[f"AIRFLOW__TRAINWRIGHT__{field.upper()}"]
    settings = settings_of(connection_ids())
    if kind == "slurm":
        assert settings.slurm_options() == {"account": "physics", "partition": "gpu"}
    else:
        login = ClusterLogin.of(settings)
        assert login == ClusterLogin(
            "https://10.0.0.1:6443", "TOKEN", Path("/etc/kubernetes/pki/ca.crt")
        )


def test_without_slurms_commands_a_connection_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(monkeypatch, "slurm")
    monkeypatch.setenv("PATH", str(tmp_path))
    connected, said = SlurmHook("mine").test_connection()
    assert not connected
    assert said.startswith("Slurm: sinfo is not installed on this machine")


@pytest.mark.slow
def test_a_slurm_connection_finds_the_cluster_and_its_partitions(
    slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_CONF")
    config = str(slurm.config)
    connect(monkeypatch, "slurm", extra={"config": config, "partition": "work,urgent"})
    assert SlurmHook("mine").test_connection() == (
        True,
        "Slurm answers; partitions: work, urgent, closed, theirs",
    )
    connect(monkeypatch, "slurm", extra={"config": config, "partition": "nope"})
    with pytest.raises(BadInput, match="partition: got 'nope'; allowed: work, urgent, "):
        SlurmHook("mine").get_conn()
