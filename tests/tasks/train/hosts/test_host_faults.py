"""One clear line for each fault of a lab's host: address, key, sources, messages, silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts_case import act, no_python, on_hosts, other_sources, until
from lab import Lab

from trainwright.tasks.errors import BadInput, ServiceUnreachable, TrainingFailed
from trainwright.tasks.train import train
from trainwright.tasks.train.checkpoint import staged
from trainwright.tasks.train.hosts.agent import BEAT_S
from trainwright.tasks.train.hosts.ssh_engine import SshEngine


def test_a_host_that_does_not_answer_is_named(tmp_path: Path, lab: Callable[..., Lab]) -> None:
    made = lab(cores=[None])
    asked = on_hosts(tmp_path, made, [40, 20], here=1)
    nobody = made.driver.rpartition(".")[0] + ".250"
    plan = json.loads(asked.plan.model_dump_json().replace(made.hosts[0].address, nobody))
    asked = asked.model_copy(update={"plan": type(asked.plan).model_validate(plan)})
    with pytest.raises(ServiceUnreachable, match=rf"host h1 \({nobody}\): .*(No route|timed out)"):
        train(asked)
    assert not list(tmp_path.glob("run/metrics/*"))


def test_a_host_with_another_key_or_an_unknown_one_is_refused(
    tmp_path: Path, lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(staged, "SHARED_MEMORY", shared)
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20])
    first, second = made.known_hosts.read_text().splitlines()
    wrong = f"{first}\n{second.split()[0]} {first.split(maxsplit=1)[1]}\n"
    made.known_hosts.write_text(wrong)
    with pytest.raises(
        ServiceUnreachable, match=r"host h2 \(.*\): its host key is not the one in known_hosts"
    ):
        train(asked)
    assert made.known_hosts.read_text() == wrong
    made.known_hosts.write_text(first + "\n")
    with pytest.raises(
        ServiceUnreachable, match=r"host h2 \(.*\): its host key is not in known_hosts"
    ):
        train(asked)
    assert made.known_hosts.read_text() == first + "\n"
    assert list(shared.iterdir()) == []
    assert until(lambda: [host.words() for host in made.hosts] == [[], []])


def test_a_host_with_other_sources_is_reported(tmp_path: Path, lab: Callable[..., Lab]) -> None:
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20])
    other_sources(made, 1, tmp_path)
    with pytest.raises(
        BadInput, match=r"host h2 \(.*\): trainwright's sources: sha256 \w+… here, \w+… there"
    ):
        train(asked)
    no_python(made, 1)
    with pytest.raises(
        ServiceUnreachable, match=r"host h2 \(.*\): .*can't be run there.*python-h2 -V` must work"
    ):
        train(asked)


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (
            '{"kind": "journal", "begins": "../../../evil", "text": "evil"}',
            "journal: rank 1 named step",
        ),
        pytest.param(
            '{"kind": "journal", "rank": 0, "begins": 0, "text": "evil"}',
            "unexpected keyword argument 'rank'",
            marks=pytest.mark.slow,
        ),
        pytest.param("{}", "KeyError", marks=pytest.mark.slow),
    ],
)
def test_a_host_that_sends_an_invalid_message_is_disconnected(
    says: str, why: str, tmp_path: Path, lab: Callable[..., Lab]
) -> None:
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20])
    (tmp_path / "says").write_text(says + "\n")
    act(made, 1, "train.worker", f"cat {tmp_path}/says >&$TRAINWRIGHT_CHANNEL; exec sleep 600")
    train(asked)  # on the other host
    assert why in (tmp_path / "work" / "logs" / "rank-1.log").read_text()
    journals = [path for path in tmp_path.rglob("*.jsonl") if path.name != "events.jsonl"]
    assert not [path for path in journals if "evil" in path.read_text()]
    assert not [path for path in tmp_path.rglob("*") if "evil" in path.name]
    assert until(lambda: [host.words() for host in made.hosts] == [[], []])


def test_a_host_with_a_stopped_agent_is_disconnected_after_a_silence(
    tmp_path: Path, lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SshEngine, "silence_s", 2 * BEAT_S)
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20])
    act(made, 1, "train.hosts.stage_data", "kill -STOP $PPID; exec sleep 600")
    with pytest.raises(TrainingFailed, match=r"host h2 \(.*no message for 10 s"):
        train(asked)
