"""The routes of runs and of the page's files: answers, access, refusals."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import doors
import httpx
import pytest
from finished_run import begin_run, finished_training, write_export, write_metrics
from layout_plans import HEAVY, plan_and_estimate
from serving import READ, RUN, client, serving

from trainwright.tasks.runs.listing import RunRow
from trainwright.tasks.summary import summary

SCRIPT = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("records")
    store = f"file://{folder / 'store'}"
    for number in (1, 2, 3):
        run = finished_training(store, "small", number)
        run.note(state="success", steps={"train": 20.0})
        run.objects.put("report/report.html", b"<script>document.title = 'ran'</script>")
    write_export(run)
    failed = begin_run(store, "other", 4)
    write_metrics(failed, 5000)
    failed.note(
        state="failed",
        step="train",
        holder=SCRIPT,
        error={"kind": "training_failed", "message": SCRIPT},
    )
    failed.objects.put("rejection.html", b"<h1>rejected</h1>")
    damaged = begin_run(store, "other", 5)
    damaged.objects.put("status.json", b"{")
    return folder


@pytest.fixture(scope="module")
def address(home: Path) -> Iterator[str]:
    with serving(home) as found:
        yield found


def test_the_timeline_of_a_runs_plan_is_a_picture(home: Path, address: str) -> None:
    run = _run(home, "small/20260101T000002Z-abcdef")
    with client(address, READ) as reader:
        unknown = reader.get("/runs/small/20260101T000002Z-abcdef/timeline")
        assert unknown.status_code == 404
        assert unknown.json()["error"]["message"].startswith("timeline: none, as the estimate does")
        for artefact in plan_and_estimate(HEAVY):
            run.write(artefact)
        answer = reader.get("/runs/small/20260101T000002Z-abcdef/timeline")
        assert answer.headers["content-type"] == "image/svg+xml"
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert "one step, rank by rank" in answer.text
        early = reader.get("/runs/other/20260101T000004Z-abcdef/timeline")
        assert early.status_code == 404
        assert "has no plan yet" in early.json()["error"]["message"]


def _run(home: Path, name: str) -> Any:

    return doors.run_at(f"file://{home / 'store'}/runs/{name}")


def test_paging_lists_every_run_once_newest_first(
    address: str,
) -> None:
    with client(address, READ) as reader:
        whole = reader.get("/runs").json()
        rows, after = [], ""
        while after is not None:
            page = reader.get(
                "/runs", params={"limit": 2} | ({"after": after} if after else {})
            ).json()
            assert page["total"] == 5
            rows += page["runs"]
            after = page["next"]
        assert rows == whole["runs"]
        assert [row["id"] for row in rows] == sorted((row["id"] for row in rows), reverse=True)
        assert [row["state"] for row in rows] == [
            "damaged",
            "failed",
            "success",
            "success",
            "success",
        ]
        assert {row["job"] for row in reader.get("/runs?job=small").json()["runs"]} == {"small"}
        for row in rows:
            RunRow.model_validate(row)


def test_a_run_is_found_by_its_holder(address: str) -> None:
    with client(address, READ) as reader:
        (row,) = reader.get("/runs", params={"holder": SCRIPT}).json()["runs"]
        assert (row["job"], row["holder"]) == ("other", SCRIPT)
        assert reader.get("/runs", params={"holder": "nobody"}).json()["runs"] == []


def test_a_run_contains_the_output_of_the_command_line(address: str, home: Path) -> None:
    with client(address, READ) as reader:
        for row in reader.get("/runs?job=small").json()["runs"]:
            document = reader.get(f"/runs/small/{row['id']}").json()
            shown = json.loads(json.dumps(summary(_run(home, f"small/{row['id']}"))))
            assert {name: document[name] for name in shown} == shown
            assert document["plan"]["global_batch_size"] == shown["global_batch_size"]
            assert {one["quantity"] for one in document["predicted_and_measured"]} >= {
                "step time",
                "duration",
                "energy",
            }


def test_history_lists_the_outcomes_of_each_jobs_runs(address: str) -> None:
    with client(address, READ) as reader:
        found = reader.get("/history").json()
        small = next(one for one in found["jobs"] if one["job"] == "small")
        assert (small["runs"], small["succeeded"], small["median_duration_s"]) == (3, 3, 20.0)
        assert (small["best_accuracy"], small["best_metric"], small["best"]) == (
            0.95,
            "accuracy",
            0.95,
        )
        assert [row["id"] for row in found["runs"]] == sorted(row["id"] for row in found["runs"])
        assert reader.get("/history?job=other").json()["runs"] == []


def test_rows_of_long_runs_are_thinned_evenly_and_followed_without_a_gap(address: str) -> None:
    with client(address, READ) as reader:
        (row,) = reader.get("/runs", params={"holder": SCRIPT}).json()["runs"]
        path = f"/runs/other/{row['id']}/metrics"
        whole = reader.get(path).json()
        assert len(whole["rows"]) <= 2000
        assert [one["step"] for one in whole["newest"]] == [4999, 4999]
        steps = sorted({one["step"] for one in whole["rows"]})
        assert {later - earlier for earlier, later in itertools.pairwise(steps)} == {
            whole["stride"]
        }
        rest = reader.get(path, params={"from_step": 3000}).json()
        assert rest["rows"] == [one for one in whole["rows"] if one["step"] >= 3000]
        assert whole["next_step"] == 5000
        assert reader.get(path, params={"from_step": whole["next_step"]}).json()["rows"] == []


ROUTES = (
    "runs",
    "history",
    "pools",
    "runs/small/20260101T000001Z-abcdef",
    "runs/small/20260101T000001Z-abcdef/metrics",
    "runs/small/20260101T000001Z-abcdef/structure",
    "runs/small/20260101T000001Z-abcdef/report",
    "runs/small/20260101T000001Z-abcdef/rejection",
    "runs/small/20260101T000003Z-abcdef/exports/onnx/model.onnx",
)


@pytest.mark.parametrize("path", ROUTES)
def test_routes_refuse_requests_without_a_token(address: str, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "_token=x"}):
        answer = httpx.get(f"{address}/{path}", headers=headers, timeout=60)
        assert (answer.status_code, answer.json()["error"]["kind"]) == (401, "unauthorized")


@pytest.mark.parametrize(
    "path",
    [
        "%3Cscript%3E/20260101T000001Z-abcdef",
        "..%2f..%2fx",
        "../../x",
        "small/..%2F..%2Fserver",
        "small/%2e%2e",
        "small/x",
        "small/20260101T000001Z-abcdeF",
        "small/20260101T000001Z-abcdef%0a",
        "a%00b/20260101T000001Z-abcdef",
    ],
)
def test_invalid_names_are_refused_before_the_store_is_read(address: str, path: str) -> None:
    with client(address, READ) as reader:
        for rest in (
            "",
            "/metrics",
            "/structure",
            "/timeline",
            "/report",
            "/rejection",
            "/exports/onnx/a",
        ):
            answer = reader.get(httpx.URL(f"{address}/runs/{path}{rest}"))
            assert answer.status_code in (404, 422), answer.text
            assert answer.headers["content-type"] == "application/json"


def test_the_files_of_a_sealed_export_are_downloads_and_no_others(address: str, home: Path) -> None:
    name = "runs/small/20260101T000003Z-abcdef"
    _run(home, "small/20260101T000003Z-abcdef").objects.put("export/onnx/secret", b"unlisted")
    with client(address, READ) as reader:
        [listed] = reader.get(f"/{name}").json()["exports"]
        assert (listed["kind"], listed["files"]) == ("onnx", ["model.onnx", "report.json"])
        answer = reader.get(f"/{name}/exports/onnx/model.onnx")
        assert (answer.status_code, answer.content) == (200, b"a model")
        assert answer.headers["content-disposition"] == 'attachment; filename="model.onnx"'
        assert answer.headers["content-security-policy"].startswith("sandbox")
        assert reader.get(f"/{name}/exports/onnx/manifest.json").status_code == 200
        for rest in ("onnx/secret", "rtl/model.onnx", "onnx/..%2f..%2fplan.json"):
            assert reader.get(f"/{name}/exports/{rest}").status_code in (404, 422)


def test_a_file_of_an_export_that_was_changed_is_not_served(address: str, home: Path) -> None:
    run = _run(home, "small/20260101T000003Z-abcdef")
    run.objects.put("export/onnx/model.onnx", b"another")
    try:
        with client(address, READ) as reader:
            answer = reader.get(f"/runs/{run.job_name}/{run.id}/exports/onnx/model.onnx")
    finally:
        run.objects.put("export/onnx/model.onnx", b"a model")
    assert answer.status_code >= 400
    assert answer.headers["content-type"] == "application/json"
    assert "changed since it was sealed" in answer.text


def test_a_missing_run_is_not_found_and_leaves_no_files(address: str, home: Path) -> None:
    with client(address, READ) as reader:
        answer = reader.get("/runs/nobody/20260101T000001Z-abcdef/metrics")
        assert (answer.status_code, answer.json()["error"]["kind"]) == (404, "not_found")
        structure = reader.get("/runs/small/20260101T000001Z-abcdef/structure")
        assert structure.status_code == 404
        rejection = reader.get("/runs/small/20260101T000001Z-abcdef/rejection")
        assert rejection.status_code == 404
        page = reader.get("/runs/other/20260101T000004Z-abcdef/rejection")
        assert (page.status_code, page.text) == (200, "<h1>rejected</h1>")
        assert page.headers["content-security-policy"].startswith("sandbox")
    assert not (home / "store" / "runs" / "nobody").exists()
    assert not (home / "work").exists()


def test_bad_queries_give_one_clear_line(address: str) -> None:
    with client(address, READ) as reader:
        for query in ("limit=0", "limit=100000", "after=../../x", "job=%3Cscript%3E", "limit=x"):
            answer = reader.get(f"/runs?{query}")
            assert answer.status_code == 422, query
            assert "\n" not in answer.json()["error"]["message"]
        for path, says in (
            (
                "/runs/small/nope",
                "got 'nope'; allowed: a run's name, such as 20261125T120000Z-0a1b",
            ),
            ("/runs/A/20260101T000001Z-abcdef", "got 'A'; allowed: a job's name: 1 to 63 lower-"),
            ("/runs?job=A", "job: got 'A'; allowed: a job's name: 1 to 63 lower-case letters"),
        ):
            assert says in reader.get(path).json()["error"]["message"]
        assert (
            reader.get("/runs/small/20260101T000001Z-abcdef/metrics?from_step=-1").status_code
            == 422
        )


def test_every_answer_has_security_headers(address: str) -> None:
    with client(address, READ) as reader:
        page = reader.get("/page/")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'self'" in policy
        assert "unsafe" not in policy
        for path in (
            "/page/",
            "/page/main.js",
            "/runs",
            "/nothing",
            "/runs/small/20260101T000001Z-abcdef/report",
        ):
            answer = reader.get(path)
            assert answer.headers["x-content-type-options"] == "nosniff", path
            assert "default-src 'none'" in answer.headers["content-security-policy"], path
        report = reader.get("/runs/small/20260101T000001Z-abcdef/report")
        assert report.headers["content-security-policy"].startswith(
            "sandbox allow-scripts;"
        )  # from another origin
        assert b"<script>" not in page.content.replace(b"<script src=", b"").replace(
            b"<script type=", b""
        )


def test_a_link_to_a_report_that_there_is_not_leads_a_browser_to_the_run(address: str) -> None:
    missing = "other/20260101T000004Z-abcdef"
    with client(address, READ) as reader:
        assert reader.get(f"/runs/{missing}/report").json()["error"]["kind"] == "not_found"
        browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
        answer = reader.get(f"/runs/{missing}/report", headers=browser)
        assert answer.status_code == 404
        assert answer.headers["content-type"].startswith("text/html")
        assert "trainwright analyze" in answer.text
        [link] = re.findall(r'<a href="([^"]+)"', answer.text)
        assert str(answer.url.join(link)) == f"{address}/page/#/run/{missing}"
        [style] = re.findall(r'rel="stylesheet" href="([^"]+)"', answer.text)
        assert reader.get(answer.url.join(style)).status_code == 200
        unknown = reader.get("/runs/small/20260101T000009Z-abcdef/report")
        assert unknown.headers["content-type"] == "application/json"


def test_the_page_loads_only_its_own_files(address: str) -> None:
    for name in (
        "../app.py",
        "..%2fapp.py",
        "%2e%2e/app.py",
        "vendor",
        "nothing.js",
        "/etc/passwd",
        "main.js%00",
    ):
        assert httpx.get(httpx.URL(f"{address}/page/{name}"), timeout=60).status_code == 404, name
    folder = Path(__file__).parents[3] / "tasks" / "service" / "records" / "page"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        answer = httpx.get(f"{address}/page/{path.relative_to(folder).as_posix()}", timeout=60)
        assert answer.status_code == 200, path
        again = httpx.get(answer.url, headers={"If-None-Match": answer.headers["etag"]}, timeout=60)
        assert again.status_code == 304
        if "vendor" not in path.parts and path.suffix != ".svg":
            assert "://" not in path.read_text().replace("s3://", "").replace(" ://", ""), path


def test_tensorboard_needs_the_right_to_start_runs_and_is_reachable_only_by_its_secret(
    address: str, home: Path
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(home / "made")) as writer:
        writer.add_scalar("loss", 0.5, 3)
    run = _run(home, "small/20260101T000002Z-abcdef")
    for path in (home / "made").iterdir():
        run.objects.put_file(f"events/{path.name}", path)
    where = "/runs/small/20260101T000002Z-abcdef/tensorboard"
    assert httpx.post(address + where, timeout=60).status_code == 401
    with client(address, READ) as reader:
        refused = reader.post(where)
        assert refused.status_code == 403
        assert (
            "starting TensorBoard needs the right to start runs"
            in refused.json()["error"]["message"]
        )
    with client(address, RUN) as reader:
        assert reader.post(where, headers={"Origin": "https://evil.example"}).status_code == 403
        nothing = reader.post("/runs/small/20260101T000001Z-abcdef/tensorboard")
        assert (nothing.status_code, nothing.json()["error"]["kind"]) == (404, "not_found")
        path = reader.post(where).json()["path"]
        assert reader.post(where).json()["path"] == path
    assert b"<tb-webapp" in httpx.get(f"{address}/{path}", timeout=60).content
    runs = httpx.get(f"{address}/{path}data/plugin/scalars/tags", timeout=60).json()
    assert "loss" in runs["."]
    for other in (
        "tensorboard/x/",
        f"tensorboard/{path.split('/')[1][:-1]}/",
        "tensorboard/x/data/runs",
    ):
        assert httpx.get(f"{address}/{other}", timeout=60).status_code == 401
