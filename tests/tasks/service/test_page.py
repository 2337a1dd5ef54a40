"""The page in a real browser: its screens show the API's answers, follow a live run, and never run
content that a run has recorded.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import doors
import pytest
from browsing import UNLABELLED, Watched, browser, refused_by_axe, tile, until, values
from drift_case import drifted
from finished_run import (
    begin_run,
    finished_training,
    store_journals,
    write_metrics,
    write_outcome,
)
from layout_cases import dense_layer
from layout_plans import HEAVY, plan_and_estimate
from serving import JOBS, POOL, READ, RUN, SPEC, client, model, serving
from small_jobs import write_table

from trainwright.estimator.curves import Affine, Interval
from trainwright.estimator.structure import Structure
from trainwright.tasks import units
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.estimate.pool_estimate import estimate
from trainwright.tasks.leases.ledger import Holder, Ledger
from trainwright.tasks.leases.queue import Queue
from trainwright.tasks.runs.artefacts.expected_wait import QueueWait
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.run_job import RunJob
from trainwright.tasks.runs.artefacts.validation import Expectation, Validation
from trainwright.tasks.runs.run import Run
from trainwright.tasks.spec.eligibility import usable
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import load_pool
from trainwright.tasks.train.record import events
from trainwright.tasks.train.record.journal import StepJournal

SCRIPT = "<script>document.title = 'ran'</script><img src=x onerror=\"document.title = 'ran'\">"
LAID_OUT = "run/laid/20260101T000000Z-abcdef"
# In the place of a Slurm cluster's command: what it printed of three nodes.
SCONTROL = """\
#!/bin/sh
for node in "c1 4 ALLOCATED" "c2 0 IDLE" "c3 0 IDLE"; do
  set -- $node
  echo "NodeName=$1 CPUAlloc=$2 CPUTot=4 ActiveFeatures=(null) Gres=(null) RealMemory=1 \
State=$3 Partitions=work"
done
"""
# The form shows the chosen run's question.
FILLED = "document.querySelector('form .note')?.textContent.startsWith('As in the run')"
JOB = {"name": "j", "data": {"uri": "builtin:digits"}}
SCREENS = {
    "pool": "pool",
    "runs": "runs",
    "run": "run/small/20260101T000002Z-abcdef",
    "history": "compare",
    "compare": "compare?runs=small/20260101T000001Z-abcdef,small/20260101T000002Z-abcdef",
    "what-if": "what-if",
}


def with_limits(plan: Plan) -> Plan:
    """The plan with a wait in Slurm's queue, limits, and a rejected configuration."""
    missed, *others = plan.alternatives
    return plan.model_copy(
        update={
            "queue_wait": QueueWait(engine="slurm", expected_s=90.0),
            "deadline_s": 3600.0,
            "budget": 5.0,
            "alternatives": [missed.model_copy(update={"feasible": False}), *others],
        }
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("page")
    store = f"file://{folder / 'store'}"
    for number, seconds in ((1, 31.0), (2, 22.0), (3, 24.5)):
        target = {"metric": "accuracy", "value": 0.97}
        run = finished_training(store, "small", number, target=target)
        figures = {"accuracy": 0.9 + number / 50, "loss": 0.2}
        result = write_outcome(run, metrics=figures, duration_s=seconds)
        run.write(result.model_copy(update={"target_reached": False}))
        run.note(
            state="success",
            steps={"validate": 1.5, "train": seconds},
            started_at=f"2026-01-0{number}T10:00:00.000+00:00",
        )
        run.objects.put("report/report.html", b"<h1>report</h1>")
    checked = run.read(Validation)
    run.write(checked.model_copy(update={"drift": drifted(store, SCRIPT, SCRIPT)}))
    laid_out = finished_training(store, "laid", 0, target={"metric": "loss", "value": 0.1})
    hostile = [dense_layer(SCRIPT, 64, 64) if one.name == "fc7" else one for one in HEAVY]
    plan, estimate = plan_and_estimate(hostile)
    laid_out.write(with_limits(plan))
    laid_out.write(estimate)
    laid_out.note(state="success", started_at="2026-01-01T09:00:00.000+00:00")
    failed = begin_run(store, "hostile", 4)
    write_metrics(failed, 40)
    failed.note(
        state="failed",
        step="train",
        holder=SCRIPT,
        error={"kind": "data_rejected", "message": SCRIPT, "nearest_deadline_s": 90.0},
    )
    failed.objects.put("rejection.html", b"<h1>rejected</h1>")
    unmet = Expectation(
        expectation=f"expect_column_{SCRIPT}",
        column=SCRIPT,
        expected={"min_value": SCRIPT},
        success=False,
        unexpected_count=3,
        sample_rows=[{"index": 7}],
    )
    kept = failed.read(Validation)
    failed.write(kept.model_copy(update={"success": False, "expectations": [unmet]}))
    failed.objects.put(
        "logs/events.jsonl",
        json.dumps({"at": SCRIPT, "event": SCRIPT, "reason": SCRIPT}).encode() + b"\n",
    )
    return folder


@pytest.fixture(scope="module")
def address(home: Path) -> Iterator[str]:
    pools = home / "pools"
    pools.mkdir()
    shutil.copy(JOBS.parent / "pools" / "two-cpus.yaml", pools)
    (pools / "wrong.yaml").write_text(
        "name: wrong\nhosts: [{name: a, address: 10.0.0.1, devices: [{type: abacus}]}]\n"
    )
    soon, later = (f"{datetime.now(UTC) + timedelta(hours=hours):%H:%M}" for hours in (3, 5))
    windows = {"shut": f"{soon}-{later}", "open": f"{later}-{soon}", "ever": None}
    hosts = [
        {"name": name, "devices": [{"type": "nvidia-l4"}], "available": window}
        for name, window in windows.items()
    ]
    hosts_of_slurm = [{"name": "node", "count": 2, "devices": [{"type": "cpu", "cores": 2}]}]
    cluster = {"name": "lab", "engine": "slurm", "hosts": hosts_of_slurm}
    (pools / "cluster.yaml").write_text(json.dumps(cluster))
    kubernetes = {"engine": "kubernetes", "kubernetes": {"image": "train:1"}}
    (pools / "pods.yaml").write_text(json.dumps(cluster | kubernetes))
    (pools / "windows.yaml").write_text(json.dumps({"name": "windows", "hosts": hosts}))
    programs = home / "bin"
    programs.mkdir()
    (programs / "scontrol").write_text(SCONTROL)
    (programs / "scontrol").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINWRIGHT_POOLS", str(pools))
        patch.setenv("PATH", str(programs), prepend=":")
        with serving(home) as found:
            yield found


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture
def tab(chromium: Any, address: str) -> Iterator[Watched]:
    watched = Watched(chromium, address, RUN)
    yield watched
    watched.context.close()
    assert watched.complaints == []
    assert watched.elsewhere == []


def _get(address: str, path: str) -> Any:
    with client(address, READ) as reader:
        return reader.get(path).json()


def _shown(value: float | None) -> str:
    """A number in JavaScript's format."""
    if value is None:
        return "–"
    return str(int(value)) if value == int(value) else repr(value)


def test_the_page_shows_the_apis_pool(tab: Watched, address: str) -> None:
    page = tab.open("pool?pool=two-cpus")
    page.wait_for_selector('table[aria-label="Devices and their leases"]')
    state = _get(address, "/pool?name=two-cpus")
    rows = values(page, "Devices and their leases")
    assert [(row[0], row[1], row[3]) for row in rows] == [
        (one["id"], one["type"], _shown(one["cores"])) for one in state["devices"]
    ]
    assert tile(page, "devices") == str(len(state["devices"]))


def test_the_page_shows_the_hosts_windows(tab: Watched, address: str) -> None:
    page = tab.open("pool?pool=windows")
    page.wait_for_selector('table[aria-label="Devices and their leases"]')
    shut, there, ever = _get(address, "/pool?name=windows")["devices"]
    shown = [(row[5], row[6]) for row in values(page, "Devices and their leases")]
    assert shown == [
        (shut["available"], "closed now"),
        (there["available"], "free"),
        ("always", "free"),
    ]
    assert tile(page, "free") == "2"
    assert ever["available"] is None
    tab.picture("pool-windows")


def test_the_page_shows_a_clusters_devices_and_the_hosts_that_runs_wait_for(
    tab: Watched, home: Path, address: str
) -> None:
    run = begin_run(f"file://{home / 'store'}", "queued", 0)
    job = run.read(RunJob).model_copy(update={"pool": str(home / "pools" / "cluster.yaml")})
    run.write(job)
    held = Ledger(f"sqlite:///{home / 'ledger.sqlite'}")
    held.take([run.hold], Holder("me"), run.uri, ttl_s=3600)
    record = events.EventRecorder(home / "work" / run.job_name / run.id)
    said = f"host node-2 waits in Slurm's queue: job 6 (Resources) {SCRIPT}"
    record({"event": "notice", "message": said, "host": "node-2", "waits": True})
    page = tab.open("pool?pool=cluster")
    page.wait_for_selector('table[aria-label="Hosts that runs wait for"]')
    state = _get(address, "/pool?name=cluster")
    assert (state["engine"], [one["host"] for one in state["waiting_hosts"]]) == (
        "slurm",
        ["node-2"],
    )
    assert [row[-1] for row in values(page, "Devices that a run may ask for")] == [
        "asked of Slurm when a run trains"
    ] * len(state["devices"])
    assert [one["name"] for one in state["cluster"]["nodes"]] == ["c1", "c2", "c3"]
    page.wait_for_selector('table[aria-label="Slurm\'s nodes"]')
    assert [row[:2] + row[3:] for row in values(page, "Slurm's nodes")] == [
        ["allocated", "1", "work", "c1"],
        ["idle", "2", "work", "c2, c3"],
    ]
    assert "0 of 8" in page.inner_text('table[aria-label="Slurm\'s nodes"]')
    (waits,) = values(page, "Hosts that runs wait for")
    assert (waits[0], waits[1], waits[4]) == ("node-2", f"{run.job_name}/{run.id}", said)
    assert tile(page, "waiting hosts") == "1"
    assert page.title() != "ran"
    assert refused_by_axe(page) == []
    tab.picture("pool-cluster")
    record({"event": "notice", "message": "came", "host": "node-2", "waits": False})
    page.wait_for_selector("text=No run is known to wait in Slurm's queue")
    run.note(state="failed")
    tab.open("pool?pool=pods").wait_for_selector("text=Unknown: the cluster is asked at training")


def test_the_page_lists_the_apis_runs_and_compares_them(tab: Watched, address: str) -> None:
    page = tab.open("runs")
    page.wait_for_selector('table[aria-label="Runs"]')
    runs = _get(address, "/runs")["runs"]
    rows = values(page, "Runs")
    assert [(row[1], row[5], row[9], row[6]) for row in rows] == [
        (one["job"], _shown(one["duration_s"]), _shown(one["energy_j"]), one["id"]) for one in runs
    ]
    box = page.locator('table[aria-label="Runs"] tbody tr >> nth=0 >> td >> nth=6').bounding_box()
    assert box["x"] + box["width"] < page.viewport_size["width"]  # the first columns are whole
    results = dict(
        page.locator('table[aria-label="Runs"] tbody tr').evaluate_all(
            "rows => rows.map((row) => [row.cells[1].textContent, row.cells[3].textContent])"
        )
    )
    assert (results["laid"], results["small"]) == ("loss 0.2000", "accuracy 0.9200")
    for ends in (True, False):  # downwards, then upwards; what is not known comes last
        page.click("button[name=sort]:has-text('duration')")
        known = [float(row[5] or "") for row in values(page, "Runs") if row[5] != "–"]
        assert known == sorted(known, reverse=ends)
        assert [row[5] == "–" for row in values(page, "Runs")] == [False] * len(known) + [True] * (
            len(runs) - len(known)
        )
    page.click("button[name=sort]:has-text('duration')")  # by age again
    page.fill("input[name=filter]", "small 0.94")
    assert [row[6] for row in values(page, "Runs")] == ["20260101T000002Z-abcdef"]
    page.fill("input[name=filter]", "")
    for one in runs[1:3]:
        page.check(f'input[value="{one["job"]}/{one["id"]}"]')
    page.click("text=Compare 2")
    page.wait_for_selector('table[aria-label="Figures of the runs"]')
    assert "the first" not in page.inner_text("main")
    figures = {row[0]: row[1:] for row in values(page, "Figures of the runs")}
    assert figures["duration"] == [_shown(one["duration_s"]) for one in runs[1:3]]
    assert figures["accuracy"] == [_shown(one["metrics"]["accuracy"]) for one in runs[1:3]]
    best = page.locator('table[aria-label="Figures of the runs"] td.best').all_text_contents()
    assert best[0] == f"{max(one['metrics']['accuracy'] for one in runs[1:3]):.4f}, best"
    assert page.locator('table[aria-label="Fields of the jobs"] tr.differs').count() == 0


def test_of_more_than_eight_runs_the_first_ones_are_compared(tab: Watched, address: str) -> None:
    one = _get(address, "/runs")["runs"][0]
    page = tab.open("compare?runs=" + ",".join([f"{one['job']}/{one['id']}"] * 9))
    page.wait_for_selector('table[aria-label="Figures of the runs"]')
    assert "the first 8 of 9" in page.inner_text("main")


def test_the_page_shows_the_apis_run(tab: Watched, address: str) -> None:
    page = tab.open(SCREENS["run"])
    name = SCREENS["run"].removeprefix("run/")
    page.wait_for_selector("figure[data-last]")
    run = _get(address, f"/runs/{name}")
    until(
        page,
        "document.querySelector('figure[aria-label^=\"Learning rate\"]').dataset.last === '29'",
    )
    assert tile(page, "step") == "30"
    assert tile(page, "loss") == _shown(run["metrics"]["loss"])  # of the validation
    assert tile(page, "duration") == _shown(run["measured"]["duration_s"])
    assert tile(page, "energy, by datasheet") == _shown(run["measured"]["energy_j"])
    assert tile(page, "accuracy") == _shown(run["metrics"]["accuracy"])
    rows = values(page, "Predicted and measured")
    assert [(row[0], row[1], row[3]) for row in rows] == [
        (
            "energy, by datasheet" if one["quantity"] == "energy" else one["quantity"],
            _shown(one["predicted"]),
            _shown(one["measured"]),
        )
        for one in run["predicted_and_measured"]
    ]
    assert {row[5] for row in rows} == {"inside", "outside"}
    assert page.title() == f"{name} – trainwright"
    assert [row[:2] for row in values(page, "Fields of the job")] == [
        [one["name"], one["used"]] for one in run["trained_with"]
    ]
    missed = page.locator("main > div >> [data-verdict=target]").inner_text()
    assert missed == "Target missed: accuracy 0.9400; wanted: at least 0.97."
    assert [row[1] for row in values(page, "Steps of the chain")] == [
        _shown(one) for one in run["steps"].values()
    ]
    shares = values(page, "Shares of a step")
    assert [(row[0], row[3]) for row in shares] == [
        (one["id"], str(one["batch_size"])) for one in run["plan"]["devices"]
    ]
    figures = page.eval_on_selector_all(
        "figure", "all => all.map(one => one.getAttribute('aria-label'))"
    )
    assert any(one.startswith("Step time by rank, s: rank 0 (here/cpu-0)") for one in figures)
    with page.expect_download() as download:
        page.click("button[name=report]")
    assert Path(download.value.path()).read_bytes() == b"<h1>report</h1>"


def test_the_page_shows_the_layout_by_layer_the_others_and_a_step(
    tab: Watched, address: str
) -> None:
    page = tab.open(LAID_OUT)
    page.wait_for_selector("section[aria-label=Layout]")
    plan = _get(address, f"/{LAID_OUT.replace('run/', 'runs/')}")["plan"]
    shown = page.inner_text("section[aria-label=Layout]")
    assert f"{plan['layout_in_words']} ({plan['layout_rule']})" in shown
    rows = values(page, "How each layer's copies are kept equal")
    assert [(row[2], row[3]) for row in rows] == [
        (_shown(one["sent_bytes"]), one["why"]) for one in plan["by_layer"]
    ]
    assert [row[0] for row in rows][1:] == ["fc6 (Linear)", f"{SCRIPT} (Linear)"]
    chosen, *rest = values(page, "The chosen configuration, and those that were not")
    assert (chosen[1], chosen[7]) == ("hybrid", "chosen")
    assert [(row[1], row[7]) for row in rest] == [
        (one["layout"], one["reason"]) for one in plan["alternatives"]
    ]
    assert [(row[0], row[2]) for row in values(page, "Other layouts")] == [
        (one["layout_in_words"], one["reason"])
        for one in plan["alternatives"]
        if one["layout_in_words"]
    ]
    assert tile(page, "at most (90 %)") == _shown(plan["not_exceeded"]["duration_s"])
    assert [tile(page, one) for one in ("wait in the queue", "deadline", "budget")] == [
        "90",
        "3600",
        "5",
    ]
    page.wait_for_selector("figure[aria-label$=' configurations, 1 not feasible']")
    page.click("section[aria-label=Layout] summary")
    page.wait_for_selector("section[aria-label=Layout] img")
    until(page, "document.querySelector('section[aria-label=Layout] img').naturalWidth === 1080")
    tab.picture("layout-light")
    assert page.title() != "ran"


def test_a_what_if_asks_for_a_layout_of_the_job(tab: Watched, home: Path) -> None:
    page = tab.open("what-if?run=laid/20260101T000000Z-abcdef")
    page.wait_for_selector("select[name=layout]")
    offered = page.eval_on_selector_all(
        "select[name=layout] option", "all => all.map(o => o.value)"
    )
    for word in offered[1:]:
        assert Job.model_validate(JOB | {"train": {"layout": word}}).train.layout == word
    until(page, FILLED)
    page.select_option("select[name=layout]", "late-multiply")
    with page.expect_request("**/plans") as asked:
        page.click("button[type=submit]")
    assert json.loads(asked.value.post_data)["train"]["layout"] == "late-multiply"
    page.wait_for_selector("[role=alert]")
    tab.complaints[:] = [one for one in tab.complaints if "422" not in one]


def test_the_page_shows_the_columns_that_drifted(tab: Watched, address: str) -> None:
    page = tab.open("run/small/20260101T000003Z-abcdef")
    page.wait_for_selector("section[aria-label=Drift] img")
    shown = page.inner_text("section[aria-label=Drift]")
    assert "1 of 1 columns drifted from file://" in shown
    assert f"column {SCRIPT!r}: PSI 0.275, threshold 0.1" in shown
    until(page, "document.querySelector('section[aria-label=Drift] img').naturalWidth > 300")
    assert page.title() != "ran"


def test_the_page_shows_the_apis_history(tab: Watched, address: str) -> None:
    page = tab.open("compare")
    page.wait_for_selector('table[aria-label="Jobs"]')
    jobs = _get(address, "/history")["jobs"]
    rows = values(page, "Jobs")
    assert [(row[0], row[1], row[5], row[8]) for row in rows] == [
        (
            one["job"],
            str(one["runs"]),
            _shown(one["median_duration_s"]),
            _shown(one["best"]),
        )
        for one in jobs
    ]
    jobs_shown = page.inner_text('table[aria-label="Jobs"]')
    assert "accuracy 0.9600" in jobs_shown
    assert "loss 0.2000" in jobs_shown


def test_curves_and_events_update_during_training(tab: Watched, home: Path) -> None:
    run = begin_run(f"file://{home / 'store'}", "moving", 9)
    write_outcome_of_a_plan_only(run)
    Ledger(f"sqlite:///{home / 'ledger.sqlite'}").take(
        [run.hold], Holder("me"), run.uri, ttl_s=3600
    )
    work = home / "work" / run.job_name / run.id
    run.note(step="allocate")
    ledger, other = Ledger(f"sqlite:///{home / 'ledger.sqlite'}"), f"{run.store_uri}/runs/small"
    ledger.take(["device here here/cpu-0"], Holder("another"), f"{other}/20260101T000001Z-abcdef")
    queue = Queue(ledger)
    queue.look(run.uri, Holder("me"), ["device here here/cpu-0"], 1, ttl_s=3600)
    waits = tab.open(f"run/moving/{run.id}")
    waits.wait_for_selector('section[aria-label="Waits for devices"] a[href*="small/2026"]')
    assert "Place 1 of 1" in waits.inner_text("[data-place='1']")
    assert "another" in waits.inner_text('section[aria-label="Waits for devices"]')
    assert waits.locator("figure:visible").count() == 0
    queue.leave(run.uri)
    run.note(step="train")
    ranks = [StepJournal(work, rank) for rank in (0, 1)]
    record = events.EventRecorder(work)
    ended = threading.Event()

    def train() -> None:
        step = 0
        while not ended.is_set():
            for rank, rows in enumerate(ranks):
                device = "there/cpu-7" if rank and step >= 10 else f"here/cpu-{rank}"  # a new plan
                rows.add(
                    step=step,
                    epoch=0,
                    rank=rank,
                    device=device,
                    batch_size=32 - 16 * rank,
                    loss=1 / (1 + step),
                    learning_rate=0.01,
                    compute_s=0.01,
                    wait_s=0.001,
                    step_time_s=0.011,
                )
            if step % 20 == 19:
                store_journals(run, ranks)
            step += 1
            if step == 10:
                record(
                    {
                        "event": "world",
                        "generation": 2,
                        "ranks": [0],
                        "reason": "rank 1 (here/cpu-1) was lost",
                    }
                )
            time.sleep(0.1)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        page = tab.open(f"run/moving/{run.id}")
        last = "Number(document.querySelector('figure[aria-label^=Loss]')?.dataset.last)"
        until(page, f"{last} > 5")
        first = page.evaluate(last)
        shown = page.inner_text("section[aria-label=Progress] [role=status]")
        assert re.fullmatch(r"epoch 1 of 3 · step \d+ of 30 · [\d.]+ % · about .+ left", shown)
        page.evaluate("document.querySelector('figure canvas').mark = window.mark = {}")
        until(page, f"{last} > {first + 25}")
        assert page.evaluate(
            "document.querySelector('figure canvas').mark === window.mark"
        )  # updated, not recreated
        page.wait_for_selector("text=rank 1 (here/cpu-1) was lost")
        page.wait_for_selector("figure[aria-label*='rank 1 (here/cpu-1, then there/cpu-7)']")
        tab.picture("live-light")
        run.note(state="failed", error={"kind": "training_failed", "message": "rank 0 ended"})
        page.wait_for_selector("text=rank 0 ended")
    finally:
        ended.set()
        trainer.join()
        run.note(state="failed")


def write_outcome_of_a_plan_only(run: Run) -> None:
    """A progress file as of a live training."""
    write_outcome(run, metrics={})
    run.objects.delete("result.json")
    run.note(started_at=run.status().updated_at)


def test_a_what_if_from_a_run_shows_the_apis_plan(tab: Watched, home: Path, address: str) -> None:
    name = "small/20260101T000003Z-abcdef"
    run = doors.run_at(f"file://{home / 'store'}/runs/{name}")
    with client(address) as asker:
        structure = asker.post(
            "/structures",
            json={"model": model((JOBS / "cnn.py").read_text(), width=8), "spec": SPEC},
        )
        run.objects.put("structure.json", structure.content)
    pool = home / "asked.json"
    pool.write_text(json.dumps(POOL))
    job = run.read(RunJob)
    limits = job.objective.model_copy(update={"minimize": "cost", "deadline": 1800.0})
    job = job.model_copy(update={"pool": str(pool), "objective": limits})
    run.write(job)
    own = _planned(run, Structure.model_validate(structure.json()))
    page = tab.open(f"what-if?run={name}")
    until(page, "document.querySelector('input[name=deadline]')?.value === '30m'")
    assert page.input_value("select[name=minimize]") == "cost"
    with page.expect_response("**/plans") as answered:
        page.click("button[type=submit]")
    asked = Plan.model_validate(answered.value.json())
    same = {"devices", "global_batch_size", "predicted", "objective", "deadline_s", "layout"}
    assert asked.model_dump(include=same) == own.model_dump(include=same)
    page.fill("input[name=epochs]", "7")
    with page.expect_response("**/plans") as answered:
        page.click("button[type=submit]")
    plan = Plan.model_validate(answered.value.json())
    assert plan.epochs == 7
    page.wait_for_selector('table[aria-label="The chosen configuration, and those that were not"]')
    assert plan.predicted is not None
    taken = _shown(plan.predicted.duration_s.median)
    until(page, f"document.querySelector('[data-tile=time] .value')?.dataset.value === '{taken}'")
    assert tile(page, "global batch size") == str(plan.global_batch_size)
    rows = values(page, "The chosen configuration, and those that were not")
    assert [row[-1] for row in rows] == ["chosen", *(one.reason for one in plan.alternatives)]
    tab.picture("what-if-answer-light")
    page.fill("input[name=deadline]", "1ms")
    page.click("button[type=submit]")
    page.wait_for_selector('[data-binding="deadline"]')
    page.fill("input[name=deadline]", "soon")
    with page.expect_response("**/plans") as refused:
        page.click("button[type=submit]")
    page.wait_for_selector("[role=alert] >> text=deadline")
    assert refused.value.status == 422
    tab.complaints[:] = [
        one for one in tab.complaints if "422" not in one
    ]  # the browser's own line on that answer


def _planned(run: Run, structure: Structure) -> Plan:
    """The run's own plan, by an estimate that is twice what the service would estimate now."""
    job, schema = run.job(), run.data()
    pool = load_pool(job.pool)
    found = estimate(structure, usable(pool, job), settings=doors.settings())
    slower = [
        curve.model_copy(
            update={
                "step_time_s": Affine(
                    fixed=2 * curve.step_time_s.fixed, per_sample=2 * curve.step_time_s.per_sample
                )
            }
        )
        for curve in found.curves
    ]
    found = found.model_copy(update={"curves": slower})
    run.write(found)
    plan = make_plan(job, pool, found, schema)
    run.write(plan)
    return plan


@pytest.mark.parametrize(
    ("chosen", "asked"),
    [("", ("the run's", 2)), ("machine:", (None, None)), ("windows", ("windows", None))],
)
def test_a_what_if_asks_for_the_runs_devices_only_in_the_runs_pool(
    tab: Watched, home: Path, chosen: str, asked: tuple[str | None, int | None]
) -> None:
    run = begin_run(f"file://{home / 'store'}", "pooled", 7)
    pool = str(home / "pools" / "two-cpus.yaml")
    job = run.read(RunJob)
    wanted = job.devices.model_copy(update={"min_count": 2})
    run.write(job.model_copy(update={"pool": pool, "devices": wanted}))
    page = tab.open("what-if?run=pooled/20260101T000007Z-abcdef")
    sent: list[Any] = []

    def answer(route: Any) -> None:
        sent.append(json.loads(route.request.post_data))
        error = {"message": "none", "binding": "deadline"}
        route.fulfill(status=200, json={"feasible": False, "error": error})

    page.route("**/plans", answer)
    until(page, FILLED)
    page.select_option("select[name=pool]", chosen)
    page.click("button[type=submit]")
    page.wait_for_selector("[data-binding=deadline]")
    (body,) = sent
    assert (body.get("pool", "the run's"), body["devices"].get("min_count")) == asked


def test_a_what_if_without_a_model_shows_the_apis_recommendation(tab: Watched, home: Path) -> None:
    table = write_table(home / "pools" / "table.csv")
    page = tab.open("what-if")
    page.route(
        "**/recommendations",
        lambda route: route.continue_(
            post_data=json.dumps(json.loads(route.request.post_data) | {"pool": POOL})
        ),
    )
    page.select_option("select[name=model]", "recommend:")
    page.select_option("select[name=minimize]", "time")
    page.click("button[type=submit]")
    page.wait_for_selector("text=Data: name the data")
    page.fill("input[name=data]", str(table))
    page.fill("input[name=target]", "label")
    with page.expect_response("**/recommendations") as answered:
        page.click("button[type=submit]")
    found = answered.value.json()
    page.wait_for_selector('table[aria-label="Recommended models"]')
    rows = values(page, "Recommended models")
    assert [row[0] for row in rows] == [one["name"] for one in found["candidates"]]
    page.click("summary")
    assert page.inner_text("pre").strip() == found["source_text"].strip()
    tab.picture("what-if-recommended-light")


def test_the_page_and_the_screens_write_figures_alike(tab: Watched) -> None:
    page = tab.open("runs")
    page.wait_for_selector('table[aria-label="Runs"]')
    figures = [0.0, 1.2e-7, 0.000823, 0.0123, 0.98765, 9.5, 20.6, 59.0, 147.3, 960.4, 5400.0]
    figures += [50_000.0, 100_000.0, 1_234_567.0, 3e9]
    ways = {
        "plain": units.plain,
        "metric": units.metric,
        "seconds": units.seconds,
        "coarse": units.coarse,
        "joules": lambda value: units.amount(value, "J"),
        "bytes": units.size,
    }
    ends = [(25.0, 20.0, 31.0), (147.0, 12.0, 7200.0), (20.6, 1.0, 90.0), (0.06, 0.001, 4.0)]
    ends += [(3e9, 2.0, 1e12)]
    written = page.evaluate(
        """async ([names, figures, ends]) => {
            const format = await import(new URL("format.js", document.baseURI));
            const triples = ends.map(([median, low, high]) => ({ median, low, high }));
            return [...names.map((name) => figures.map((value) => format[name](value).text)),
                triples.map((one) => format.predicted(one, format.seconds).text),
                triples.map((one) => format.predicted(one, format.joules).text)];
        }""",
        [list(ways), figures, ends],
    )
    expected = [[way(value) for value in figures] for way in ways.values()]
    triples = [Interval(median=m, low=low, high=high).model_dump() for m, low, high in ends]
    for way in (units.seconds, ways["joules"]):
        expected.append([units.predicted(one, way) for one in triples])
    assert [[text.replace("µs", "us") for text in texts] for texts in written] == expected


def test_stored_names_and_addresses_are_shown_as_text(tab: Watched) -> None:
    for screen in (
        "run/hostile/20260101T000004Z-abcdef",
        "runs",
        f"run/{SCRIPT}",
        "run/../../x",
        f"compare?runs={SCRIPT}",
        f"airflow?dag={SCRIPT}&run=x",
        f"pool?pool={SCRIPT}",
        "nothing",
        "__proto__",
    ):
        page = tab.open(screen)
        page.wait_for_selector("h1, [role=alert], .note")
        page.wait_for_timeout(300)
        assert page.title() != "ran", screen
        assert page.locator("main script, main img").count() == 0
    tab.complaints[:] = [
        one for one in tab.complaints if "404" not in one
    ]  # the pool with that name
    page = tab.open("run/hostile/20260101T000004Z-abcdef")
    page.wait_for_selector("[role=alert]")
    assert SCRIPT in page.inner_text("[role=alert]")
    (unmet,) = values(page, "Expectations that failed")
    assert unmet == [SCRIPT, SCRIPT, f"min value: {SCRIPT}", "3 rows", "3", "7"]
    assert page.get_attribute("[role=alert] a", "href") == (
        "#/what-if?run=hostile%2F20260101T000004Z-abcdef&deadline=90s"
    )
    with page.expect_download() as download:
        page.click("button[name=rejection]")
    assert Path(download.value.path()).read_bytes() == b"<h1>rejected</h1>"


def test_a_wrong_pool_file_shows_its_error_and_another_can_be_chosen(
    tab: Watched, address: str
) -> None:
    with client(address, READ) as reader:
        refused = reader.get("/pool?name=wrong")
        assert (refused.status_code, refused.json()["error"]["kind"]) == (422, "bad_input")
        assert "abacus" in refused.json()["error"]["message"]
        assert reader.get("/pool?name=none").json()["error"]["kind"] == "not_found"
    page = tab.open("pool?pool=wrong")
    page.wait_for_selector("[role=alert] >> text=abacus")
    page.select_option("select", "two-cpus")
    page.wait_for_selector('table[aria-label="Devices and their leases"]')
    assert page.locator("[role=alert]").count() == 0
    tab.complaints[:] = [
        one for one in tab.complaints if "422" not in one
    ]  # the browser's own line on that answer


def test_the_tab_in_airflow_finds_the_run_of_a_dag_run(tab: Watched, home: Path) -> None:
    run = doors.run_at(f"file://{home / 'store'}/runs/small/20260101T000001Z-abcdef")
    run.note(holder="Airflow retrain manual__2026-01-01T10:00:00+00:00")
    page = tab.page
    page.goto(
        f"{tab.address}/page/?screen=airflow&dag=retrain&run=manual__2026-01-01T10%3A00%3A00%2B00%3A00&task=train"
    )
    page.wait_for_selector("h1 >> text=small / 20260101T000001Z-abcdef")


@pytest.mark.parametrize("screen", SCREENS)
def test_every_control_has_an_accessible_name_and_is_reachable_by_keyboard(
    tab: Watched, screen: str
) -> None:
    page = tab.open(SCREENS[screen])
    page.wait_for_selector("main h1")
    page.wait_for_load_state("networkidle")  # its requests are answered
    page.wait_for_timeout(500)
    assert page.evaluate(UNLABELLED) == []
    reached = "a[href], button:not(:disabled), input, select, [tabindex='0']"
    focusable = page.evaluate(f'document.querySelectorAll("{reached}").length')
    reached = set()
    for _ in range(focusable + 2):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)")
        )
    assert len(reached) >= focusable
    page.evaluate("document.activeElement.blur()")


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_pictures_of_every_screen_in_light_and_dark(
    chromium: Any, address: str, scheme: str
) -> None:
    tab = Watched(chromium, address, RUN, color_scheme=scheme)
    backs = set()
    for name, screen in SCREENS.items():
        page = tab.open(screen)
        page.wait_for_selector("main h1")
        page.wait_for_timeout(2000)
        backs.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert refused_by_axe(page) == [], name
        tab.picture(f"{name}-{scheme}")
    narrow = Watched(
        chromium, address, RUN, color_scheme=scheme, viewport={"width": 390, "height": 800}
    )
    for name, waited in (("run", "figure[data-last]"), ("runs", "td"), ("what-if", "form")):
        page = narrow.open(SCREENS[name])
        page.wait_for_selector(waited)
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert refused_by_axe(page) == [], name
        narrow.picture(f"narrow-{name}-{scheme}")
    assert tab.complaints + narrow.complaints == []
    (back,) = backs
    brightness = sum(int(one) for one in back.removeprefix("rgb(").rstrip(")").split(","))
    assert (brightness > 600) == (scheme == "light")
    tab.context.close()
    narrow.context.close()


def test_the_page_asks_for_the_token_before_it_shows_data(chromium: Any, address: str) -> None:
    tab = Watched(chromium, address, None)
    page = tab.open("runs")
    page.wait_for_selector("input[name=token]")
    assert page.locator("table").count() == 0
    page.fill("input[name=token]", "wrong-token-for-tests")
    page.keyboard.press("Enter")
    page.wait_for_selector("[role=alert] >> text=not the service's")
    page.fill("input[name=token]", READ)
    page.keyboard.press("Enter")
    page.wait_for_selector('table[aria-label="Runs"]')
    assert page.evaluate("Object.keys(localStorage).length") == 0
    assert "token" not in page.url
    tab.context.close()


def test_a_reader_sees_that_an_action_needs_the_right_to_start_runs(
    chromium: Any, address: str
) -> None:
    tab = Watched(chromium, address, READ)
    page = tab.open("what-if")
    page.select_option("select[name=model]", "file:cnn.py")
    page.fill("input[name=data]", "builtin:digits")
    page.click("button[type=submit]")
    page.wait_for_selector("[role=alert] >> text=needs the right to start runs")
    tab.context.close()
