"""Training on the nodes of a real Slurm cluster."""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import doors
import pytest
from container_case import contain
from hosts_case import SLOW, until
from lab import LabHost
from layout_ranks import structure_of
from slurm_case import on_slurm, pool_of
from slurm_lab import SlurmLab
from staged_case import with_stages
from training_case import once, request, rows, with_min_count

from trainwright.estimator.predict.step_time import predict_curve
from trainwright.tasks.allocate import acquire
from trainwright.tasks.errors import (
    BadInput,
    Interrupted,
    RunHeld,
    ServiceUnreachable,
)
from trainwright.tasks.leases.ledger import Holder
from trainwright.tasks.runs.artefacts.plan import PlannedDevice
from trainwright.tasks.settings import Settings
from trainwright.tasks.slurm import slurm_commands
from trainwright.tasks.spec.pool import Pool
from trainwright.tasks.train import TrainRequest, train
from trainwright.tasks.train.hosts import arrivals, reconnect
from trainwright.tasks.train.hosts.host_engine import HostRequest
from trainwright.tasks.train.hosts.host_order import numbered
from trainwright.tasks.train.hosts.session import Session
from trainwright.tasks.train.hosts.slurm.slurm_engine import SlurmEngine
from trainwright.tasks.train.record.waiting_hosts import waiting_hosts

pytestmark = pytest.mark.slow


def losses(asked: TrainRequest, rank: int = 0) -> list[float]:
    return [row["loss"] for row in rows(asked, f"steps-rank{rank}")]


def left(cluster: SlurmLab) -> list[str]:
    """Jobs in the queue, and our processes on the nodes."""
    return cluster.queue() + [line for host in cluster.lab.hosts for line in ours(host)]


def ours(host: LabHost) -> list[str]:
    """The command lines of the processes on a node that are not Slurm's own."""
    return [line for line in host.words() if not line.startswith("slurm")]


def test_nodes_reach_the_same_losses_as_this_machine(
    tmp_path: Path, slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_CONF")  # the settings say where the cluster is
    split: dict[str, Any] = {"backend": "torch", "model": {"norm": True, "dropout": 0.2}}
    local = request(tmp_path / "local", [60, 40, 20], **split)
    expected = train(local)
    away = on_slurm(tmp_path / "away", slurm, [60, 40, 20], **split)
    cluster = Settings({"TRAINWRIGHT_SLURM_CONFIG": str(slurm.config)})
    result = train(away.model_copy(update={"settings": cluster}))
    assert losses(away) == losses(local)
    assert result.metrics == expected.metrics
    until(lambda: left(slurm) == [], 10)
    assert left(slurm) == []


@pytest.mark.parametrize(
    ("options", "count", "why"),
    [
        ({"partition": "nope"}, 1, "Invalid partition name specified; got .*--partition=nope"),
        ({"constraint": "slow"}, 1, "Invalid feature specification; got .*--constraint=slow"),
        ({"node": "h9"}, 1, "Invalid node name specified"),
        ({"partition": "closed"}, 1, "Invalid user id; got .*--partition=closed"),
        ({"gres": "tpu"}, 1, "Invalid generic resource"),
        ({"partition": "theirs", "account": "us"}, 1, "Job's account not .* this partition"),
        ({}, 40, "PartitionConfig; got --cpus-per-task=40"),
    ],
)
def test_what_slurm_refuses_is_told_in_one_line(
    options: dict[str, Any], count: int, why: str, tmp_path: Path, slurm: SlurmLab
) -> None:
    if "gres" in options:
        pool = Pool.model_validate(pool_of(slurm, 1, 1.0, options))
        gpu = PlannedDevice.model_construct(type="nvidia-a100-80gb", engine="slurm")
        with pytest.raises(BadInput, match=why):
            ask(pool, gpu, tmp_path)
        return
    asked = on_slurm(tmp_path, slurm, [60], options=options)
    if count > 1:
        wide = asked.plan.devices[0].model_copy(update={"type": "cpu", "cores": float(count)})
        plan = asked.plan.model_copy(update={"devices": [wide]})
        asked = asked.model_copy(update={"plan": plan})
    with pytest.raises(BadInput, match=rf"host cpu: Slurm refuses its job: .*{why}") as error:
        train(asked)
    assert "\n" not in str(error.value)
    assert until(lambda: left(slurm) == [], 10), left(slurm)


def ask(pool: Pool, device: PlannedDevice, folder: Path) -> dict[str, Any]:
    """Ask for a host with this device; what it says of itself."""
    (folder / "logs").mkdir()
    asked = HostRequest(pool.hosts[0], (device,), sys.executable)
    session = Session(asked, SlurmEngine(pool, Settings(), "case"), folder)
    try:
        return session.hello()
    finally:
        session.close(1.0)


def test_a_host_sees_the_gpu_of_its_job_under_the_number_that_ranks_use(
    tmp_path: Path, slurm: SlurmLab
) -> None:
    """The GPU is a fake: a device node. It is the fourth of its node, and the first of the job."""
    pool = Pool.model_validate(pool_of(slurm, 1, 1.0, {"gres": "gpu:a100"}))
    device = PlannedDevice.model_construct(
        type="nvidia-a100-80gb", engine="slurm", address="cpu", index=3
    )
    found = ask(pool, device, tmp_path)
    assert (found["node"], found["gpus"]) == ("h1", "0")
    assert [str(one.index) for one in numbered([device], "cpu")] == found["gpus"].split(",")


@pytest.mark.parametrize("absent", ["munge", "controller", "commands"])
def test_a_slurm_that_does_not_answer_is_told_in_one_line(
    absent: str, tmp_path: Path, slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = slurm.config.read_text()
    if absent == "munge":
        config, why = config.replace("munge.socket", "absent"), "[Mm]unge"
    elif absent == "controller":
        config, why = re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=9", config), "contact slurm"
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
        why = "not installed on this machine"
    (tmp_path / "slurm.conf").write_text(config)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setattr(slurm_commands, "ANSWER_S", 3.0)
    with pytest.raises(ServiceUnreachable, match=rf"^Slurm: .*({why}|no answer)") as error:
        train(on_slurm(tmp_path, slurm, [60]))
    assert "\n" not in str(error.value)


def test_a_killed_launcher_leaves_no_process_and_no_job(tmp_path: Path, slurm: SlurmLab) -> None:
    """Three of its jobs run, and one waits in the queue."""
    asked = on_slurm(tmp_path, slurm, [30, 20, 10, 10], SLOW, epochs=100, backend="torch")
    (tmp_path / "request.json").write_text(asked.model_dump_json(by_alias=True))
    code = (
        "import sys; from pathlib import Path; "
        "from trainwright.tasks.train.hosts import arrivals; arrivals.BEGIN_AFTER_S = 0.0; "
        "from trainwright.tasks.train import TrainRequest, train; "
        "train(TrainRequest.model_validate_json(Path(sys.argv[1]).read_text()))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "request.json")])
    try:
        assert until(lambda: bool(list(tmp_path.glob("run/checkpoints/*/state.json"))))
        states = sorted(line.split("|")[3] for line in slurm.queue())
        assert states == ["PENDING", "RUNNING", "RUNNING", "RUNNING"]
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    assert until(lambda: not any(map(ours, slurm.lab.hosts)), 5)
    assert until(lambda: slurm.queue() == [], 15), slurm.queue()


def test_runs_at_once_share_no_node_and_come_in_the_order_of_slurms_priority(
    tmp_path: Path, slurm: SlurmLab
) -> None:
    """Ten runs that ask for a host each, and hold it for a while without training."""
    pool = Pool.model_validate(pool_of(slurm, 1, 1.0, {}))
    device = PlannedDevice.model_construct(type="emulated", engine="slurm", cores=None)
    asked = HostRequest(pool.hosts[0], (device,), sys.executable)
    may_end, held = threading.Event(), []

    def hold(number: int) -> None:
        folder = tmp_path / str(number)
        (folder / "logs").mkdir(parents=True)
        session = Session(asked, SlurmEngine(pool, Settings(), f"run{number}"), folder)
        try:
            node, began = session.hello()["node"], time.monotonic()
            may_end.wait()
            time.sleep(0.3)
            held.append((began, time.monotonic(), node))
        finally:
            session.close(1.0)

    with ThreadPoolExecutor(max_workers=10) as workers:
        runs = [workers.submit(hold, number) for number in range(10)]
        try:
            assert until(
                lambda: (
                    sorted(line.split("|")[3] for line in slurm.queue())
                    == ["PENDING"] * 7 + ["RUNNING"] * 3
                )
            )
            shown = slurm.do("squeue", "-h", "-o", "%i %Q %T").splitlines()
            found = [
                (int(job), int(priority), state) for job, priority, state in map(str.split, shown)
            ]
            waiting = sorted((one for one in found if one[2] == "PENDING"), key=lambda one: -one[1])
            (first, highest, _), (last, _, _) = waiting[0], waiting[-1]
            slurm.do("scontrol", "update", f"job={last}", f"priority={highest + 1}")
            expected = [last, first, *(job for job, _, _ in waiting[1:-1])]
        finally:
            may_end.set()
    for one in runs:
        one.result()
    held.sort()
    for node in {node for _, _, node in held}:
        times = [(began, ended) for began, ended, where in held if where == node]
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))
    shown = slurm.do("squeue", "-h", "-t", "all", "-o", "%i %S").splitlines()
    began = {int(job): start for job, start in map(str.split, shown)}  # to the second
    starts = [began[job] for job in expected]
    assert starts[0] == min(starts)
    # three nodes: a job may come up to two places later than its turn, as it starts with others
    assert all(start <= later for start, later in zip(starts, starts[3:], strict=False))


def until_all_are_back(
    asked: TrainRequest, heard: list[dict[str, Any]], *acts: Any, killed: bool = False
) -> None:
    """Train with these acts, each (condition, act), and stop when all are back; no step is lost.

    A rank that was `killed` may have done its last step without a record of it.
    """
    stop = threading.Event()
    count = len(asked.plan.devices)
    watchers = [once(condition, act) for condition, act in acts]
    watchers.append(once(lambda: f"continues with {count} of {count}" in reasons(heard), stop.set))
    with pytest.raises(Interrupted, match=r"stopped after step \d+; its checkpoint is kept"):
        train(asked, stop=stop)
    for one in watchers:
        one.join()
    taken: Counter[int] = Counter()
    for row in [row for rank in range(count) for row in rows(asked, f"steps-rank{rank}")]:
        taken[row["step"]] += row["batch_size"]
    assert sorted(taken) == list(range(len(taken)))
    lacking = [60 - taken[step] for step in taken if (step + 1) % 24 and taken[step] != 60]
    own = [device.batch_size for device in asked.plan.devices]
    assert lacking in ([], *([one] for one in own if killed))


def trained(heard: list[dict[str, Any]], step: int) -> bool:
    return any(event["event"] == "train" and event["step"] >= step for event in list(heard))


def reasons(heard: list[dict[str, Any]]) -> str:
    return "; ".join(event["reason"] for event in list(heard) if event["event"] == "split")


def resume(cluster: SlurmLab, node: str) -> None:
    """Bring a node back."""
    with contextlib.suppress(OSError):  # it may be back by itself
        cluster.update_node(node, "resume")


def test_a_training_goes_on_without_a_lost_node_and_takes_it_back(
    tmp_path: Path, slurm: SlurmLab, heard: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is given back comes back too: see the preempted host."""
    monkeypatch.setattr(reconnect, "TRY_EVERY_S", 0.5)
    asked = on_slurm(tmp_path, slurm, [30, 20, 10], SLOW, epochs=400, backend="torch")

    def is_without() -> bool:
        return "continues with 2 of 3" in reasons(heard)

    until_all_are_back(
        asked,
        heard,
        (lambda: trained(heard, 10), lambda: slurm.update_node("h2", "down")),
        (is_without, lambda: resume(slurm, "h2")),
        killed=True,
    )
    lost = r"rank \d \(.*\) is lost: .*[Nn]ode failure.*; continues with 2 of 3"
    assert re.search(lost, reasons(heard))
    assert until(lambda: left(slurm) == [], 10), left(slurm)


def test_too_few_hosts_are_given_back_and_asked_for_again(
    tmp_path: Path, slurm: SlurmLab, heard: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that two runs don't wait for each other for ever."""
    monkeypatch.setattr(arrivals, "GIVE_BACK_AFTER_S", 1.0)
    monkeypatch.setattr(arrivals, "MOST_PAUSE_S", 0.1)
    other = subprocess.Popen(["srun", "-N2", "-w", "h2,h3", "sleep", "600"])
    assert until(lambda: len(slurm.queue()) == 1)
    asked = with_min_count(on_slurm(tmp_path, slurm, [40, 20], backend="torch"), 2)

    def given_back() -> bool:
        return any("given back for now" in str(event.get("message")) for event in list(heard))

    watcher = once(given_back, other.terminate)
    assert train(asked).steps == 24
    watcher.join()
    assert other.wait() != 0
    waits = next(one for one in heard if "waits in Slurm's queue" in str(one))
    assert "(Resources)" in waits["message"] or "(Priority)" in waits["message"]
    assert waiting_hosts(heard[: heard.index(waits) + 1]) == [waits]
    assert waiting_hosts(heard) == []


def test_a_run_whose_hosts_are_not_granted_in_time_says_so(tmp_path: Path, slurm: SlurmLab) -> None:
    slurm.update_node("h2", "drain")
    try:
        asked = on_slurm(tmp_path, slurm, [60], options={"node": "h2"})
        job = asked.job.model_copy(update={"queue_timeout": 1.0})
        with pytest.raises(RunHeld, match=r"host cpu not granted within queue_timeout \(1 s\)"):
            train(asked.model_copy(update={"job": job}))
        assert until(lambda: left(slurm) == [], 10), left(slurm)
    finally:
        slurm.update_node("h2", "resume")


def urgent(cluster: SlurmLab, node: str, seconds: float) -> subprocess.Popen[bytes]:
    """A job of another user's that takes a node by preemption."""
    return subprocess.Popen(["srun", "-p", "urgent", "-w", node, "sleep", str(seconds)])


def test_a_preempted_host_leaves_between_two_steps_and_comes_back(
    tmp_path: Path, slurm: SlurmLab, heard: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In containers, which get the signals that Slurm gives their jobs."""
    monkeypatch.setattr(reconnect, "TRY_EVERY_S", 0.5)
    asked = on_slurm(tmp_path, slurm, [30, 20, 10], SLOW, epochs=400, backend="torch")
    contain(asked, {"image": "/:O"})
    others: list[subprocess.Popen[bytes]] = []
    until_all_are_back(
        asked,
        heard,
        (lambda: trained(heard, 10), lambda: others.append(urgent(slurm, "h3", 1))),
    )
    assert others[0].wait() == 0
    assert "was given back to the cluster; continues with 2 of 3" in reasons(heard)


def test_a_pipeline_of_which_a_host_is_preempted_saves_waits_and_goes_on(
    home: Path, tmp_path: Path, slurm: SlurmLab, heard: list[dict[str, Any]]
) -> None:
    options = {"epochs": 4, "backend": "torch", "checkpoint": {"every_steps": 1000}}
    stages: list[tuple[list[int], list[float]]] = [([30, 30], [0.5])]
    quiet = with_stages(request(tmp_path / "quiet", [60, 0], **options), stages)
    train(quiet)
    heard.clear()
    plain = on_slurm(tmp_path / "away", slurm, [60, 0], SLOW, **options)
    staged = with_stages(plain, stages)
    curve = predict_curve(structure_of(plain, 60), None, device_type="emulated", speed=1.0)
    plan = staged.plan.model_copy(update={"emulated_layers": list(curve.layers)})
    asked = staged.model_copy(update={"plan": plan, "resume": True})
    run = doors.open_for(asked.job, Holder("me"), store=(tmp_path / "store").as_uri())
    run.write(asked.plan)
    others: list[subprocess.Popen[bytes]] = []

    def preempt() -> None:
        nodes = [line.split("|")[4] for line in slurm.queue() if "cpu-2" in line]
        others.append(urgent(slurm, nodes[0], 1))
        others.append(urgent(slurm, "h3", 1))  # so that it can't go on at once

    watcher = once(lambda: trained(heard, 10), preempt)

    def work(halt: threading.Event, claim: Callable[[], bool]) -> Any:
        return train(asked, stop=halt, still_mine=claim)

    result = acquire.on_devices(doors.attach(run), work, "training")
    watcher.join()
    assert [one.wait() for one in others] == [0, 0]
    waits = next(one["message"] for one in heard if "waiting for hosts" in str(one))
    assert re.match(r"the cluster takes back the host of rank 1 .*step \d+ is kept; waiting", waits)
    assert losses(asked, 1) == losses(quiet, 1)
    assert result.steps == 96
    assert until(lambda: left(slurm) == [], 10), left(slurm)


def test_the_others_go_on_without_a_host_that_is_cut_off_silently(
    tmp_path: Path, slurm: SlurmLab, heard: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlurmEngine, "silence_s", 7.0)
    asked = on_slurm(tmp_path, slurm, [30, 20, 10], SLOW, epochs=400, backend="torch")
    stop = threading.Event()
    watchers = [
        once(lambda: trained(heard, 10), lambda: slurm.lab.cut("h2")),
        once(lambda: "continues with 2 of 3" in reasons(heard), stop.set),
    ]
    try:
        with pytest.raises(Interrupted):
            train(asked, stop=stop)
    finally:
        slurm.lab.join("h2")
    for one in watchers:
        one.join()
    assert "no message for 7 s" in reasons(heard)
