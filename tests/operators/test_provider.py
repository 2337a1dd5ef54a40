"""The provider's metadata, checked by Airflow's own code; the settings from its connections."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import airflow
import doors
import jsonschema
import pytest
from airflow.sdk import Connection
from airflow.sdk.exceptions import AirflowFailException
from airflow.sdk.log import redact
from finished_run import begin_run
from hypothesis import given
from hypothesis import strategies as st
from packages import install
from sqlalchemy.engine import make_url

from trainwright import operators
from trainwright.infra.s3_server import S3Access
from trainwright.operators import AnalyzeOperator, ValidateOperator
from trainwright.operators.base import StepOperator
from trainwright.operators.hooks import HostHook, LedgerHook, StoreHook, settings_of
from trainwright.operators.provider import get_provider_info
from trainwright.operators.triggers import TrainingTrigger
from trainwright.tasks import chain
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.run import list_runs
from trainwright.tasks.spec.host_spec import Ssh
from trainwright.tasks.ssh import ssh_command
from trainwright.tasks.storage.connect import open_store

LOOK = """
import json, pkgutil, importlib, sys, warnings
from airflow.providers_manager import ProvidersManager
manager = ProvidersManager()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Airflow's own parts
    import airflow.api_fastapi.app
    hooks = {
        kind: hook.hook_class_name
        for kind, hook in manager.hooks.items()
        if kind.startswith("trainwright") and hook
    }
warnings.simplefilter("error")
import trainwright.operators, trainwright.dags
for package in (trainwright.operators, trainwright.dags):
    for module in pkgutil.iter_modules(package.__path__):
        if module.name != "__main__":
            importlib.import_module(f"{package.__name__}.{module.name}")
for name in trainwright.operators.__all__:
    needed = {"run": "file:///runs/x/y"} if name == "ApprovePromotionOperator" else {}
    getattr(trainwright.operators, name)(task_id="x", **needed)
widgets, links = sorted(manager.connection_form_widgets), manager.extra_links_class_names
print(json.dumps({"hooks": hooks, "widgets": widgets, "links": links}))
"""


def test_the_metadata_matches_airflows_schema_and_its_classes_exist() -> None:
    schema = json.loads((Path(airflow.__path__[0]) / "provider_info.schema.json").read_text())
    jsonschema.validate(get_provider_info(), schema)
    for option in get_provider_info()["config"]["trainwright"]["options"].values():
        assert len(option["description"]) > 10


def test_airflow_finds_hooks_forms_and_links_without_deprecation_warnings(
    home: Path, tmp_path: Path
) -> None:
    environment = os.environ | {
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    }
    done = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    kinds = ("store", "ledger", "ssh", "slurm", "kubernetes")
    assert set(found["hooks"]) == {f"trainwright_{kind}" for kind in kinds}
    assert "extra__trainwright_store__store" in found["widgets"]
    assert {name.rpartition(".")[2] for name in found["links"] if "trainwright" in name} == {
        "RunFolderLink",
        "PlanLink",
        "ReportLink",
        "TensorBoardLink",
        "RejectionLink",
    }


@pytest.mark.parametrize("name", operators.__all__)
def test_operators_document_inputs_results_and_failures_and_template_their_inputs(
    name: str,
) -> None:
    operator = getattr(operators, name)
    assert "| input | default | meaning |" in operator.__doc__
    assert "Returns `{" in operator.__doc__
    assert "| failure | what Airflow does |" in operator.__doc__
    inputs = inputs_of(operator)
    assert {name for name, templated in inputs.items() if templated} <= set(
        operator.template_fields
    )
    ours = [
        one
        for one in operator.__mro__
        if one.__module__.startswith("trainwright.") and "__init__" in vars(one)
    ]
    taken = {name for one in ours for name in inspect.signature(one.__init__).parameters}
    assert taken - {"self", "kwargs"} <= set(inputs)


def inputs_of(operator: Any) -> dict[str, bool]:
    """The inputs in an operator's table, and whether the table marks each as templated."""
    table = operator.__doc__.partition("| input |")[2].partition("\n\n")[0]
    cells = re.findall(r"^ *\| (.*?) \|", table, re.MULTILINE)
    found = inputs_of(StepOperator) if "those of `StepOperator`" in cells else {}
    return found | {
        name: "*(templated)*" in cell for cell in cells for name in re.findall(r"`(\w+)`", cell)
    }


def test_a_store_connection_replaces_the_environments_settings_without_changing_them(
    s3: S3Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = {
        "conn_type": "trainwright_store",
        "host": s3.endpoint,
        "login": s3.access_key,
        "password": s3.secret_key,
        "extra": {"store": "s3://by-connection/here"},
    }
    monkeypatch.setenv("AIRFLOW_CONN_MY_STORE", json.dumps(connection))
    monkeypatch.setenv("TRAINWRIGHT_S3_SECRET_KEY", "wrong")
    before = dict(os.environ)
    settings = settings_of({"store_conn_id": "my_store"})
    store = open_store(settings.store, settings)
    store.put("a", b"1")
    assert (store.uri, store.get("a")) == ("s3://by-connection/here", b"1")
    assert dict(os.environ) == before
    assert StoreHook("my_store").test_connection() == (True, "the store answers")


def test_a_store_connection_without_a_store_applies_to_the_configured_store(
    s3: S3Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__TRAINWRIGHT__STORE", "s3://by-configuration/here")
    monkeypatch.delenv("TRAINWRIGHT_STORE", raising=False)
    connection = {
        "conn_type": "trainwright_store",
        "host": s3.endpoint,
        "login": s3.access_key,
        "password": s3.secret_key,
    }
    monkeypatch.setenv("AIRFLOW_CONN_MY_STORE", json.dumps(connection))
    monkeypatch.setenv("TRAINWRIGHT_S3_SECRET_KEY", "wrong")
    settings = settings_of({"store_conn_id": "my_store"})
    open_store(settings.store, settings).put("a", b"1")
    assert settings.store == "s3://by-configuration/here"
    assert StoreHook("my_store").test_connection() == (True, "the store answers")


def test_a_store_connection_without_keys_is_refused() -> None:
    connection = Connection(conn_id="c", conn_type="trainwright_store", host="http://other:9000")
    with pytest.raises(BadInput, match="connection c: the store s3://bucket needs an endpoint"):
        StoreHook.variables(connection, {"store": "s3://bucket"})
    with_it = doors.settings().replaced(StoreHook.variables(connection, {"store": "file:///f"}))
    assert with_it.s3_credentials() is None


@given(st.text(min_size=1, max_size=30), st.text(min_size=1, max_size=30))
def test_any_password_survives_in_the_ledgers_url(login: str, password: str) -> None:
    connection = Connection(
        conn_id="l",
        conn_type="trainwright_ledger",
        host="db",
        port=5433,
        schema="w",
        login=login,
        password=password,
    )
    url = make_url(LedgerHook.variables(connection, {})["TRAINWRIGHT_LEDGER"])
    assert (url.username, url.password, url.host, url.port, url.database) == (
        login,
        password,
        "db",
        5433,
        "w",
    )


def test_a_ledger_connection_opens_its_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = {
        "conn_type": "trainwright_ledger",
        "schema": str(tmp_path / "l.sqlite"),
        "extra": {"driver": "sqlite"},
    }
    monkeypatch.setenv("AIRFLOW_CONN_MY_LEDGER", json.dumps(connection))
    assert LedgerHook("my_ledger").test_connection() == (True, "the ledger answers; 0 lease(s)")
    assert (tmp_path / "l.sqlite").exists()
    with pytest.raises(BadInput, match="Database is empty"):
        LedgerHook.variables(Connection(conn_id="l"), {})


def test_no_log_shows_the_ledgers_url(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = {
        "conn_type": "trainwright_ledger",
        "host": "db",
        "schema": "w",
        "login": "me",
        "password": "p@ss/word",
    }
    monkeypatch.setenv("AIRFLOW_CONN_MY_LEDGER", json.dumps(connection))
    url = settings_of({"ledger_conn_id": "my_ledger"}).ledger_url
    assert make_url(url).password == "p@ss/word"
    assert url not in str(redact(f"can't reach {url}"))


def test_a_trigger_uses_the_connections_of_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = {
        "conn_type": "trainwright_ledger",
        "schema": str(tmp_path / "l.sqlite"),
        "extra": {"driver": "sqlite"},
    }
    monkeypatch.setenv("AIRFLOW_CONN_MY_LEDGER", json.dumps(connection))
    ids = {"ledger_conn_id": "my_ledger"}
    run = (tmp_path / "store" / "runs" / "j" / "20260101T000000Z-abcdef").as_uri()
    context = asyncio.run(TrainingTrigger(run, "holder", connections=ids).context())
    assert context.holder.name == "holder"
    assert (tmp_path / "l.sqlite").exists()


def test_a_host_that_looks_like_an_ssh_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "AIRFLOW_CONN_EVIL",
        json.dumps({"conn_type": "trainwright_ssh", "host": "-oProxyCommand=x"}),
    )
    with pytest.raises(BadInput, match="a name or address"):
        HostHook("evil").get_conn()


def test_a_host_connection_defines_the_ssh_login_unless_the_pool_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ann").touch()
    (tmp_path / "known").touch()
    connection = {
        "conn_type": "trainwright_ssh",
        "host": "10.0.0.9",
        "login": "ann",
        "port": 2222,
        "extra": {"identity": str(tmp_path / "ann"), "known_hosts": str(tmp_path / "known")},
    }
    monkeypatch.setenv("AIRFLOW_CONN_HOSTS", json.dumps(connection))
    command = HostHook("hosts").get_conn()
    for option in (
        "User=ann",
        "Port=2222",
        f'IdentityFile="{tmp_path}/ann"',
        f'UserKnownHostsFile="{tmp_path}/known"',
        "BatchMode=yes",
    ):
        assert option in command
    settings = settings_of({"ssh_conn_id": "hosts"})
    assert "User=bob" in ssh_command("10.0.0.1", settings, Ssh(user="bob"))
    assert "Port=2222" in ssh_command("10.0.0.1", settings, Ssh(user="bob"))
    assert "Port=2222" not in ssh_command("10.0.0.1", doors.settings())


def test_an_invalid_port_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_SSH_PORT", "ssh")
    with pytest.raises(BadInput, match="TRAINWRIGHT_SSH_PORT: port: got 'ssh'"):
        ssh_command("10.0.0.1", doors.settings())


def test_a_tasks_links_open_its_run_on_the_page(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINWRIGHT_STORE", (tmp_path / "store").as_uri())
    run = begin_run((tmp_path / "store").as_uri(), "linked", 1)
    operator = AnalyzeOperator(task_id="analyze", run=run.uri)
    links = {link.name: link for link in operator.operator_extra_links}

    def addresses(operator: AnalyzeOperator) -> dict[str, str]:
        return {
            name: link.get_link(operator, ti_key=None).rpartition("/trainwright/")[2]
            for name, link in links.items()
        }

    assert set(addresses(operator).values()) == {""}
    context: Any = {"dag_run": SimpleNamespace(dag_id="d", run_id="r")}
    operator.open(context)
    name = f"linked/{run.id}"
    assert addresses(operator) == {
        "Run folder": f"page/#/run/{name}",
        "Plan": f"page/#/run/{name}?part=plan",
        "Report": f"runs/{name}/report",
        "TensorBoard": f"page/#/run/{name}?part=tensorboard",
    }
    elsewhere = AnalyzeOperator(
        task_id="other", run=begin_run((tmp_path / "else").as_uri(), "linked", 2).uri
    )
    elsewhere.open(context)
    assert set(addresses(elsewhere).values()) == {""}


def test_only_a_task_that_rejected_its_data_links_to_the_page_of_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINWRIGHT_STORE", (tmp_path / "store").as_uri())
    data = tmp_path / "few.csv"
    data.write_text("x,label\n1,a\n2,b\n")
    operator = ValidateOperator(task_id="validate", job={"name": "few", "data": {"uri": str(data)}})
    (link,) = [one for one in operator.operator_extra_links if one.name == "Rejected data"]
    assert link.get_link(operator, ti_key=None) == ""
    context: Any = {"dag_run": SimpleNamespace(dag_id="d", run_id="r")}
    with pytest.raises(AirflowFailException, match="data_rejected: the data fails"):
        operator.execute(context)
    (run,) = list_runs((tmp_path / "store").as_uri(), doors.settings(), "few")
    address = link.get_link(operator, ti_key=None)
    assert address.endswith(f"/trainwright/runs/few/{run.id}/rejection")
    assert b"data rejected" in run.objects.get("rejection.html")


def test_airflows_configuration_applies_if_the_environment_is_silent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AIRFLOW__TRAINWRIGHT__STORE", "file:///by-airflow")
    monkeypatch.setenv("TRAINWRIGHT_STORE", "file:///by-variable")
    assert settings_of({}).store == "file:///by-variable"
    monkeypatch.delenv("TRAINWRIGHT_STORE")
    assert settings_of({}).store == "file:///by-airflow"


def test_a_broken_registered_step_keeps_neither_airflow_nor_the_other_decorators_from_working(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = get_provider_info()["task-decorators"]
    install(tmp_path / "mine", {"broken": "1 / 0"}, chain.ENTRY_POINTS, {"own": "broken:STEP"})
    monkeypatch.syspath_prepend(tmp_path / "mine")
    own = {
        "name": "trainwright_own",
        "class-name": "trainwright.operators.decorators.own_task",
    }
    assert get_provider_info()["task-decorators"] == [*ours, own]


def test_a_process_of_airflow_that_uses_no_step_does_not_import_the_chain() -> None:
    code = "import airflow.sdk, sys; print(*(one for one in sys.modules if 'trainwright' in one))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert "trainwright.operators.provider" in modules
    assert "trainwright.tasks.chain" not in modules
