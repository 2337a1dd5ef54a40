"""The page in a complete Airflow's UI, in a browser: tabs show the run, viewers only read.

The service behind the page requires Airflow's login. Hostile input is refused, or shown as text.
"""

from __future__ import annotations

import http.server
import json
import random
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import doors
import httpx
import pytest
from airflow_client import AirflowClient, until
from browsing import Watched, browser

from trainwright.infra import airflow as embedded
from trainwright.infra import local
from trainwright.infra.ports import free_ports
from trainwright.tasks.runs.run import Run, list_runs

FOREIGN = Path(__file__).parent / "foreign"
JOBS = Path(__file__).parents[2] / "dags" / "jobs"
JOB = {
    "name": "shown-in-airflow",
    "data": {"uri": "builtin:digits"},
    "model": {"source": str(JOBS / "cnn.py"), "config": {"width": 4}},
}
SCRIPT = "<script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">"
SPEC = {
    "inputs": {"inputs": [1, 8, 8]},
    "input_dtypes": {"inputs": "float32"},
    "target_dtype": "int64",
    "classes": 10,
    "task": "image-classification",
}
MODEL = {"source": "cnn.py", "config": {"width": 4}}
_AIRFLOWS_FRAME = "An iframe which has both allow-scripts and allow-same-origin"
"""Chromium's messages about Airflow's frame around every plugin's page"""
CHANGES = {
    "structures": {"model": MODEL, "spec": SPEC},
    "estimates": {"model": MODEL, "batch_size": 8, "device_type": "cpu"},
    "plans": {"name": "what-if", "model": MODEL, "data": {"uri": "builtin:digits"}},
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def airflow(
    _apart: Path, _server: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AirflowClient]:
    """A complete Airflow with an admin, a viewer, and one DAG."""
    dags = tmp_path_factory.mktemp("dags")
    (dags / "tabs.py").symlink_to(FOREIGN / "tabs.py")
    alone = embedded.airflow_environment

    def with_a_viewer(home: Path, folder: Path) -> dict[str, str]:
        return alone(home, folder) | {
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "admin:admin,viewer:viewer",
            # The machine is busy, because it also runs the browser.
            "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "60",
        }

    alone(_apart, dags)  # creates the folder
    with free_ports(1, random.randrange(20000, 32000)) as port:
        (_apart / "airflow" / "secrets" / "port").write_text(str(port))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "airflow_environment", with_a_viewer)
        local.up(_apart, dags)
        try:
            api = AirflowClient(_apart)
            until("the DAG is read", lambda: api.has_dag("tabs"))
            api("PATCH", "/api/v2/dags/tabs", {"is_paused": False})
            yield api
        finally:
            embedded.stop_airflow(_apart)  # not the S3 server, which the whole session shares


def password(user: str) -> str:
    """The password that Airflow generated."""
    return str(json.loads(embedded.password_file(doors.settings().home).read_text())[user])


@pytest.fixture(scope="module")
def where(airflow: AirflowClient) -> str:
    """A successful DAG run."""
    found = airflow.start("tabs", job=JOB)
    assert airflow.ended(found) == "success", airflow.states(found)
    return found


@pytest.fixture(scope="module")
def run(where: str) -> Run:
    """The run of that DAG run."""
    return next(iter(list_runs(doors.settings().store, doors.settings(), "shown-in-airflow")))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found


@contextmanager
def logged_in(
    chromium: Any, airflow: AirflowClient, user: str, **options: Any
) -> Iterator[Watched]:
    """A browser in which a user has logged in to Airflow by the form."""
    tab = Watched(chromium, airflow.base, None, **options)
    tab.page.set_default_timeout(300_000)  # Airflow's UI takes minutes on a busy machine
    tab.page.goto(airflow.base)
    tab.page.fill("input[name=username]", user)
    tab.page.fill("input[name=password]", password(user))
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_url(lambda url: "/auth/login" not in url)
    try:
        yield tab
    finally:
        tab.context.close()


def _as(airflow: AirflowClient, user: str, **headers: str) -> httpx.Client:
    credentials = {"username": user, "password": password(user)}
    token = httpx.post(f"{airflow.base}/auth/token", json=credentials, timeout=60).json()[
        "access_token"
    ]
    return httpx.Client(
        base_url=airflow.base, headers={"Authorization": f"Bearer {token}"} | headers, timeout=200
    )


def ours(tab: Watched) -> list[str]:
    """The console's errors that concern our page."""
    return [
        one
        for one in tab.complaints
        if "trainwright" in one.lower() and not one.startswith(_AIRFLOWS_FRAME)
    ]


@pytest.mark.parametrize(("user", "theme"), [("admin", "light"), ("viewer", "dark")])
def test_every_tab_of_airflows_ui_shows_our_page(
    chromium: Any, airflow: AirflowClient, where: str, run: Run, user: str, theme: str
) -> None:
    run_id = urllib.parse.unquote(where.rpartition("/")[2])
    of_run = f"/dags/tabs/runs/{urllib.parse.quote(run_id, safe='')}"
    heading = f"h1 >> text={run.job_name} / {run.id}"
    with logged_in(chromium, airflow, user, color_scheme="light") as tab:
        tab.context.add_init_script(f"localStorage.setItem('theme', '{theme}')")
        page = tab.page
        for name, start, route, shown in (
            ("nav", "/", "trainwright-nav", 'table[aria-label="Devices and their leases"]'),
            ("dag", "/dags/tabs", "trainwright-dag", f'a[href="#/run/{run.job_name}/{run.id}"]'),
            ("dag-run", of_run, "trainwright-dag-run", heading),
            ("task", f"{of_run}/tasks/extract", "trainwright-task-instance", heading),
        ):
            page.goto(airflow.base + start)
            page.locator(f'a[href$="/plugin/{route}"]').first.click()
            inside = page.frame_locator('iframe[src*="trainwright/page"]')
            inside.locator(shown).first.wait_for()
            inside.locator(".brand").wait_for(
                state="hidden"
            )  # the path in Airflow's own navigation
            frame = next(one for one in page.frames[1:] if "/trainwright/page/" in one.url)
            assert frame.evaluate("document.documentElement.dataset.theme") == theme
            assert frame.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            page.wait_for_timeout(1000)
            tab.picture(f"airflow-{name}-{theme}")
        assert ours(tab) == []


def test_the_service_requires_airflows_login(airflow: AirflowClient) -> None:
    for method, path in (
        ("GET", "devices"),
        ("GET", "pool"),
        ("GET", "openapi.json"),
        ("POST", "plans"),
        ("POST", "estimates"),
        ("POST", "structures"),
        ("GET", "runs"),
        ("GET", "pools"),
        ("GET", "history"),
        ("GET", "runs/small/20260101T000001Z-abcdef/metrics"),
        ("GET", "page/"),
        ("GET", "page/main.js"),
        ("GET", "tensorboard/x/"),
    ):
        answer = httpx.request(method, f"{airflow.base}/trainwright/{path}", timeout=60)
        assert answer.status_code == 401, path
        assert answer.json()["error"]["kind"] == "unauthorized"


def test_an_admin_can_start_what_a_viewer_can_only_read(airflow: AirflowClient) -> None:
    with _as(airflow, "viewer") as viewer, _as(airflow, "admin", Origin=airflow.base) as admin:
        structure = admin.post("/trainwright/structures", json=CHANGES["structures"])
        assert structure.status_code == 200, structure.text
        estimate = {"structure": structure.json(), "batch_size": 32, "device_type": "nvidia-t4"}
        assert viewer.post("/trainwright/estimates", json=estimate).json()["mode"] == "datasheet"
        assert viewer.get("/trainwright/devices").json()["devices"]


def test_airflow_lists_the_page_for_navigation_dags_runs_and_tasks(airflow: AirflowClient) -> None:
    with _as(airflow, "viewer") as viewer:
        plugins = viewer.get("/api/v2/plugins").json()["plugins"]
    (ours,) = (one for one in plugins if one["name"] == "trainwright")
    assert {one["destination"] for one in ours["external_views"]} == {
        "nav",
        "dag",
        "dag_run",
        "task_instance",
    }
    assert len({one["url_route"] for one in ours["external_views"]}) == 4


def test_a_viewer_sees_a_run_and_which_actions_need_more_rights(
    chromium: Any, airflow: AirflowClient, where: str, run: Run
) -> None:
    with logged_in(chromium, airflow, "viewer") as tab:
        page = tab.page
        page.goto(f"{airflow.base}/trainwright/page/#/run/{run.job_name}/{run.id}")
        page.locator(f"h1 >> text={run.id}").wait_for()
        page.click("button[name=tensorboard]")
        page.wait_for_selector("text=starting TensorBoard needs the right to start runs")
        assert page.is_disabled("button[name=tensorboard]")
        tab.picture("airflow-viewer-denied")
        assert [one for one in ours(tab) if "403" not in one] == []


def test_a_viewer_can_not_change_anything(airflow: AirflowClient, where: str, run: Run) -> None:
    board = f"runs/{run.job_name}/{run.id}/tensorboard"
    with _as(airflow, "viewer") as viewer:
        for path in (
            "pool",
            "pools",
            "devices",
            "runs",
            "history",
            f"runs/{run.job_name}/{run.id}",
            "page/",
        ):
            assert viewer.get(f"/trainwright/{path}").status_code == 200, path
        for path, body in {**CHANGES, board: {}}.items():
            refused = viewer.post(f"/trainwright/{path}", json=body)
            assert (refused.status_code, refused.json()["error"]["kind"]) == (403, "forbidden"), (
                path
            )
        assert (
            viewer.post(
                "/api/v2/dags/tabs/dagRuns", json={"conf": {}, "logical_date": None}
            ).status_code
            == 403
        )
        assert viewer.patch(where, json={"state": "failed"}).status_code == 403
    assert airflow(method="GET", path=where)["state"] == "success"


@contextmanager
def elsewhere(content: str) -> Iterator[str]:
    """A page of another origin. Cookies ignore the port, so the browser sends it the same ones."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_page_of_another_origin_can_not_use_the_admins_cookie(
    chromium: Any, airflow: AirflowClient, where: str, run: Run
) -> None:
    board = f"runs/{run.job_name}/{run.id}/tensorboard"
    asked = {
        f"{airflow.base}/trainwright/{path}": body for path, body in {**CHANGES, board: {}}.items()
    }
    script = "".join(
        f"fetch({json.dumps(address)}, {{method: 'POST', credentials: 'include', mode: 'no-cors',"
        f" body: {json.dumps(json.dumps(body))}}});"
        for address, body in asked.items()
    )
    with (
        logged_in(chromium, airflow, "admin") as tab,
        elsewhere(f"<script>{script}</script>") as evil,
    ):
        answers: dict[str, int] = {}
        tab.page.on("response", lambda one: answers.update({one.url: one.status}))
        tab.page.goto(evil)
        until(
            "the answers came",
            lambda: tab.page.wait_for_timeout(200) or set(asked) <= set(answers),
            60,
        )
        assert {address: answers[address] for address in asked} == dict.fromkeys(asked, 403)
    with _as(airflow, "admin", Origin="https://evil.example") as foreign:
        for path, body in {**CHANGES, board: {}}.items():
            refused = foreign.post(f"/trainwright/{path}", json=body)
            assert (refused.status_code, refused.json()["error"]["message"].split(":")[0]) == (
                403,
                "origin",
            ), path


@pytest.mark.parametrize("name", [SCRIPT, "../../x"])
def test_a_job_with_a_hostile_name_fails_in_one_line_and_does_no_harm(
    chromium: Any, airflow: AirflowClient, name: str
) -> None:
    before = {one.uri for one in list_runs(doors.settings().store, doors.settings())}
    found = airflow.start("tabs", job=JOB | {"name": name})
    assert airflow.ended(found) == "failed"
    assert "bad_input" in airflow.log(found, "validate")
    assert {one.uri for one in list_runs(doors.settings().store, doors.settings())} == before
    with _as(airflow, "admin") as admin:
        quoted = urllib.parse.quote(name, safe="")
        for path in (
            f"runs/{quoted}/20260101T000000Z-abcdef",
            f"runs?job={quoted}",
            f"pool?name={quoted}",
        ):
            answer = admin.get(f"/trainwright/{path}")
            assert 400 <= answer.status_code < 500, path
            assert answer.headers["content-type"] == "application/json"
        assert (
            admin.post("/trainwright/plans", json=CHANGES["plans"] | {"name": name}).status_code
            == 422
        )


def test_the_tab_of_a_dag_run_that_opened_no_run_shows_the_error_line(
    chromium: Any, airflow: AirflowClient, where: str
) -> None:
    failed = airflow.start("tabs", job=JOB | {"train": {"epochs": -1}})
    assert airflow.ended(failed) == "failed"
    log = airflow.log(failed, "validate")
    assert "bad_input: job: train.epochs: got -1" in log
    assert "error_detail" not in log  # Airflow's word for a traceback
    run_id = failed.rpartition("/")[2]
    with logged_in(chromium, airflow, "viewer") as tab:
        tab.page.goto(
            f"{airflow.base}/trainwright/page/?screen=airflow&dag=tabs"
            f"&run={urllib.parse.quote(urllib.parse.unquote(run_id), safe='')}"
        )
        line = tab.page.locator("[role=alert] >> text=bad_input: ").first
        line.wait_for()
        assert "train.epochs" in line.inner_text()
        tab.picture("airflow-failed")


def test_hostile_names_in_a_tabs_address_are_shown_as_text(
    chromium: Any, airflow: AirflowClient, where: str
) -> None:
    with logged_in(chromium, airflow, "admin") as tab:
        page = tab.page
        for name in (SCRIPT, "../../x", "javascript:document.title='ran'"):
            quoted = urllib.parse.quote(name, safe="")
            for query in (
                f"screen=airflow&dag={quoted}&run={quoted}",
                f"screen={quoted}",
                f"screen=runs&dag={quoted}",
                f"screen=run/{quoted}",
                f"screen=pool&pool={quoted}",
            ):
                page.goto(f"{airflow.base}/trainwright/page/?{query}")
                page.wait_for_selector("main h1, main .note, main [role=alert]")
                page.wait_for_timeout(200)
                assert page.title() != "ran", query
                assert page.locator("main script, main img").count() == 0
        assert [one for one in ours(tab) if "404" not in one and "422" not in one] == []
