"""The service mounted in Airflow's API server, behind its login and permissions. A real server."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browsing import Watched, browser, values

from trainwright.infra.airflow import (
    airflow_address,
    airflow_environment,
    ensure_airflow_db,
    password_file,
)

DAGS = Path(__file__).parents[2] / "dags"
MODEL = {"source": "cnn.py", "config": {"width": 4}}
SPEC = {
    "inputs": {"inputs": [1, 8, 8]},
    "input_dtypes": {"inputs": "float32"},
    "target_dtype": "int64",
    "classes": 10,
    "task": "image-classification",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    home = tmp_path_factory.mktemp("airflow-home")
    environment = os.environ | airflow_environment(home, DAGS)
    environment["AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS"] = "admin:admin,viewer:viewer"
    environment["TRAINWRIGHT_STORE"] = f"file://{tmp_path_factory.mktemp('store')}"
    if not any(
        one.name == "trainwright"
        for one in importlib.metadata.entry_points(group="airflow.plugins")
    ):
        plugins = tmp_path_factory.mktemp("plugins")  # like a user's copy, without installation
        (plugins / "ours.py").write_text(
            "from trainwright.operators.plugin import TrainwrightPlugin\n"
        )
        environment["AIRFLOW__CORE__PLUGINS_FOLDER"] = str(plugins)
    ensure_airflow_db(home, DAGS)
    base = airflow_address(home)
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "airflow", "api-server"],
            env=environment,
            stdout=log,
            stderr=log,
            cwd=home,
        )
    try:
        deadline = time.monotonic() + 240
        while True:
            assert process.poll() is None, (home / "server.log").read_text()[-3000:]
            assert time.monotonic() < deadline
            try:
                if httpx.get(f"{base}/api/v2/version", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(1)
        yield base, home
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _as(server: tuple[str, Path], user: str) -> httpx.Client:
    base, home = server
    password = json.loads(password_file(home).read_text())[user]
    token = httpx.post(
        f"{base}/auth/token", json={"username": user, "password": password}, timeout=60
    ).json()
    return httpx.Client(
        base_url=f"{base}/trainwright",
        headers={"Authorization": f"Bearer {token['access_token']}"},
        timeout=200,
    )


@pytest.mark.slow
def test_the_service_requires_airflows_login(server: tuple[str, Path]) -> None:
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
        answer = httpx.request(method, f"{server[0]}/trainwright/{path}", timeout=60)
        assert answer.status_code == 401, path
        assert answer.json()["error"]["kind"] == "unauthorized"


@pytest.mark.slow
def test_a_viewer_can_only_read_and_an_admin_can_start(server: tuple[str, Path]) -> None:
    request: dict[str, Any] = {"model": MODEL, "spec": SPEC}
    with _as(server, "viewer") as viewer, _as(server, "admin") as admin:
        refused = viewer.post("/structures", json=request)
        assert (refused.status_code, refused.json()["error"]["kind"]) == (403, "forbidden")
        structure = admin.post("/structures", json=request)
        assert structure.status_code == 200, structure.text
        estimate = {"structure": structure.json(), "batch_size": 32, "device_type": "nvidia-t4"}
        assert viewer.post("/estimates", json=estimate).json()["mode"] == "datasheet"
        assert viewer.get("/devices").json()["devices"]


@pytest.mark.slow
def test_only_pages_of_our_origin_are_accepted(server: tuple[str, Path]) -> None:
    with _as(server, "admin") as admin:
        foreign = admin.post("/estimates", json={}, headers={"Origin": "https://evil.example"})
        assert (foreign.status_code, foreign.json()["error"]["kind"]) == (403, "forbidden")
        assert admin.post("/estimates", json={}, headers={"Origin": server[0]}).status_code == 422


@pytest.mark.slow
def test_airflow_lists_the_page_for_navigation_dags_runs_and_tasks(
    server: tuple[str, Path],
) -> None:
    base, home = server
    password = json.loads(password_file(home).read_text())["viewer"]
    token = httpx.post(
        f"{base}/auth/token", json={"username": "viewer", "password": password}, timeout=60
    ).json()
    headers = {"Authorization": f"Bearer {token['access_token']}"}
    plugins = httpx.get(f"{base}/api/v2/plugins", headers=headers, timeout=60).json()["plugins"]
    (ours,) = (one for one in plugins if one["name"] == "trainwright")
    assert {one["destination"] for one in ours["external_views"]} == {
        "nav",
        "dag",
        "dag_run",
        "task_instance",
    }
    assert len({one["url_route"] for one in ours["external_views"]}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_appears_in_airflows_ui_behind_its_login_in_its_colours(
    server: tuple[str, Path], theme: str
) -> None:
    base, home = server
    with browser() as chromium:
        tab = Watched(chromium, base, None, color_scheme="light")
        tab.context.add_init_script(f"localStorage.setItem('theme', '{theme}')")
        page = tab.page
        page.goto(base)
        page.fill("input[name=username]", "viewer")
        page.fill("input[name=password]", json.loads(password_file(home).read_text())["viewer"])
        page.keyboard.press("Enter")
        page.wait_for_url(lambda url: "/auth/login" not in url)
        page.goto(f"{base}/plugin/trainwright-nav")
        inside = page.frame_locator("iframe")
        inside.locator('table[aria-label="Devices and their leases"]').wait_for()
        tab.picture(f"airflow-{theme}")
        frame = next(one for one in page.frames[1:] if "/trainwright/page/" in one.url)
        assert frame.evaluate("document.documentElement.dataset.theme") == theme
        with _as(server, "viewer") as viewer:
            devices = viewer.get("/pool").json()["devices"]
        rows = values(frame, "Devices and their leases")
        assert [row[0] for row in rows] == [one["id"] for one in devices]
        inside.locator("text=What if").click()
        inside.locator("select[name=model]").select_option("file:cnn.py")
        inside.locator("input[name=data]").fill("builtin:digits")
        inside.locator("button[type=submit]").click()
        inside.locator(
            "[role=alert] >> text=needs the right to start runs"
        ).wait_for()  # a viewer's 403
        theirs = (
            "403",
            "An iframe which has both allow-scripts and allow-same-origin",
        )  # Airflow creates the frame
        assert [
            one
            for one in tab.complaints
            if "trainwright" in one and not any(map(one.__contains__, theirs))
        ] == []
        tab.context.close()
