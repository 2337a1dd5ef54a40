"""The runs' files in a browser, and the links that lead there. Who may see them is tested on a real server elsewhere."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from finished_run import begin_run

from trainwright.operators import AnalyzeOperator
from trainwright.operators.files import create_files_app
from trainwright.operators.service import airflow_client
from trainwright.tasks.service.auth import Client


@pytest.fixture
def browser(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setenv("TRAINWRIGHT_STORE", (tmp_path / "store").as_uri())
    app = create_files_app()
    app.dependency_overrides[airflow_client] = lambda: Client("read")
    return TestClient(app)


def test_a_tasks_links_lead_to_its_runs_files(browser: TestClient, tmp_path: Path) -> None:
    run = begin_run((tmp_path / "store").as_uri(), "linked", 1)
    run.objects.put("report/report.html", b"<p>hello</p>")
    operator = AnalyzeOperator(task_id="analyze", run=run.uri)
    context: Any = {"dag_run": SimpleNamespace(dag_id="d", run_id="r")}
    links = {link.name: link for link in operator.operator_extra_links}
    assert links["Report"].get_link(operator, ti_key=None) == ""
    operator.open(context)
    report = links["Report"].get_link(operator, ti_key=None).partition("/trainwright-files")[2]
    answer = browser.get(report)
    assert (answer.status_code, answer.text) == (200, "<p>hello</p>")
    assert "sandbox allow-scripts;" in answer.headers["content-security-policy"]
    folder = browser.get(links["Run folder"].get_link(operator, ti_key=None).partition("/trainwright-files")[2])
    assert 'href="report/report.html"' in folder.text
    assert (
        browser.get(links["Plan"].get_link(operator, ti_key=None).partition("/trainwright-files")[2]).status_code == 404
    )
    elsewhere = AnalyzeOperator(task_id="other", run=begin_run((tmp_path / "else").as_uri(), "linked", 2).uri)
    elsewhere.open(context)
    assert links["Report"].get_link(elsewhere, ti_key=None) == ""


@pytest.mark.parametrize(
    "path", ["%2e%2e/%2e%2e/secret", "linked/%2e%2e/secret", "linked/20260101T000001Z-abcdef/%2e%2e/%2e%2e/%2e%2e/secret",
             "%3Cscript%3E/20260101T000001Z-abcdef/", "linked/20260101T000001Z-abcdef/%3Cscript%3E"]
)  # fmt: skip
def test_no_path_leads_out_of_the_runs_and_nothing_given_comes_back(
    browser: TestClient, tmp_path: Path, path: str
) -> None:
    begin_run((tmp_path / "store").as_uri(), "linked", 1)
    (tmp_path / "store" / "secret").write_text("top secret")
    answer = browser.get(f"/{path}")
    assert answer.status_code == 404
    assert "top secret" not in answer.text
    assert "<script>" not in answer.text
