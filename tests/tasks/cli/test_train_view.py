"""The view of a training: a line for each rank, as wide as the terminal, from the events alone."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from trainwright.tasks import chain
from trainwright.tasks.cli.screens.runs.run_view import Watch
from trainwright.tasks.cli.screens.runs.train_view import TrainView
from trainwright.tasks.event_lines import LINE_EVERY_S, MovingLines

FIGURES = st.floats(0, 1e5, allow_nan=False)


def event(step: int, steps: int, ranks: list[int], **fields: Any) -> dict[str, Any]:
    """The event that the first rank sends for a step."""
    return {
        "event": "train",
        "step": step,
        "steps": steps,
        "epoch": 1,
        "epochs": 5,
        "loss": 0.25,
        "learning_rate": 1e-3,
        "samples_per_s": 1000.0,
        "step_time_s": 0.1,
        "ranks": [
            {
                "rank": number,
                "batch_size": 10 * (number + 1),
                "samples_per_s": 100.0,
                "compute_s": 0.05,
                "wait_s": 0.03,
                "communication_s": 0.02,
                "memory_bytes": 2.0**30,
            }
            for number in ranks
        ],
        **fields,
    }


def shown(view: TrainView, width: int = 80) -> list[str]:
    """The lines on a terminal of this width."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(view)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_every_rank_has_a_line_with_its_parts_of_the_step() -> None:
    view = TrainView()
    view.take({"event": "ranks", "devices": ["lab/gpu-0", "lab/gpu-1", "lab/gpu-2"]})
    view.take(event(10, 100, [0, 2]))
    lines = shown(view)
    assert lines[0] == "step  10/100  epoch 2/5  loss 0.2500   1000 samples/s"
    assert shown(view, 200)[0].startswith("step  10/100  epoch 2/5  loss 0.2500  lr 1.00e-03")
    assert shown(view, 45)[0] == "step  10/100  epoch 2/5"
    by_device = {
        line.split()[0]: line.split()[1:] for line in lines[3:]
    }  # below the bar and the names of columns
    assert " ".join(by_device["lab/gpu-0"]) == "10 100 ms 50 % 30 % 20 % 100 1 GiB"
    assert by_device["lab/gpu-2"][0] == "30"
    assert by_device["lab/gpu-1"][-1] == "out"  # it was lost, and the others continue


@given(
    names=st.lists(st.text("abc/-_09", min_size=1, max_size=60), min_size=1, max_size=8),
    step_s=FIGURES,
    figure=FIGURES,
    memory=st.one_of(st.none(), st.floats(0, 1e13)),
    steps=st.integers(1, 10**8),
    width=st.sampled_from([60, 80, 200]),
)
def test_any_figures_fit_any_terminal(
    names: list[str], step_s: float, figure: float, memory: float | None, steps: int, width: int
) -> None:
    view = TrainView()
    view.take({"event": "ranks", "devices": names})
    one = event(
        steps // 2,
        steps,
        list(range(len(names))),
        step_time_s=step_s,
        samples_per_s=figure,
        loss=figure,
    )
    for rank in one["ranks"]:
        part = min(figure, step_s)
        rank |= {
            "compute_s": part,
            "wait_s": part,
            "samples_per_s": figure,
            "memory_bytes": memory,
            "batch_size": 99999,
        }
    view.take(one)
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    lines = console.render_lines(view, console.options)
    assert all(sum(segment.cell_length for segment in line) <= width for line in lines)
    assert len(lines) == 3 + len(names)


@given(st.integers(1, 1000), st.integers(1, 1000), st.floats(0.01, 100))
def test_the_remaining_time_follows_from_the_pace_so_far(
    done: int, left: int, step_s: float
) -> None:
    now = [0.0]
    view = TrainView(lambda: now[0])
    view.take(event(5, 5 + done + left, [0]))
    assert view.left_s() is None
    now[0] = done * step_s
    view.take(event(5 + done, 5 + done + left, [0]))
    assert view.left_s() == pytest.approx(left * step_s)
    now[0] += step_s
    assert view.left_s() == pytest.approx(left * step_s)  # without events, it does not grow
    view.take(
        event(3, 5 + done + left, [0])
    )  # it went back to a checkpoint: the pace is measured again
    assert view.left_s() is None


def test_a_log_gets_a_line_at_intervals_and_an_epochs_line_counts() -> None:
    now, lines = [0.0], list[str]()
    moving = MovingLines(lines.append, lambda: now[0])
    moving(event(1, 9, [0], loss=0.2512345678901234))
    assert lines == ["step 1/9  epoch 2/5  loss 0.2512  lr 1.00e-03   1000 samples/s"]
    moving(event(2, 9, [0]))
    now[0] += LINE_EVERY_S
    moving({"event": "epoch", "epoch": 1})
    moving(event(3, 9, [0]))
    assert len(lines) == 1
    now[0] += LINE_EVERY_S
    moving(event(4, 9, [0]))
    moving({"event": "notice", "message": "has a line of its own"})
    assert [line.split()[1] for line in lines] == ["1/9", "4/9"]
    for rows in (10_000, 20_000):
        moving({"event": "prepare", "uri": "x.csv", "rows": rows, "of": 30_000})
    assert lines[2:] == ["data: 10,000 of 30,000 rows prepared"]


SHOW = """
import json, sys, time
from trainwright.tasks.cli.screens.runs.run_view import Watch
with Watch() as watch:
    for event in json.loads(sys.argv[1]):
        watch(event)
        time.sleep(0.4)
"""


def test_lost_ranks_and_a_failed_step_are_reported_and_repeated_messages_only_once() -> None:
    lost = {"event": "rank", "rank": 1, "device": "a/cpu1", "state": "was killed by SIGKILL"}
    waits = {"event": "notice", "message": "waits for the store"}
    place = {"event": "queue", "place": 2, "waiting": 2, "held_by": "other"}
    moved = place | {"place": 1, "waiting": 1}
    world = {"event": "world", "generation": 2, "ranks": [0, 1], "reason": "rank 1 is back"}
    ends = [
        {
            "event": "step",
            "name": "train",
            "state": "failed",
            "error": {"kind": kind, "message": ""},
        }
        for kind in ("interrupted", "training_failed")
    ]
    events = json.dumps(
        [lost | {"state": "loaded"}, lost, waits, waits, place, place, moved, world, *ends]
    )
    done = subprocess.run(
        [sys.executable, "-c", SHOW, events],
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stderr.splitlines() == [
        "lost       rank 1 (a/cpu1) was killed by SIGKILL",
        "note       waits for the store",
        "queue      place 2 of 2; held by other",
        "queue      place 1 of 1; held by other",
        "ranks      training continues with 2",
        "train      stopped",
        "train      failed",
    ]


def test_figures_keep_their_places_in_the_line_while_a_training_goes_on() -> None:
    view, ends = TrainView(), set()
    for step, speed in ((1, 9.0), (10, 950.0), (100, 12345.0)):
        view.take(event(step, 100, [0], loss=1 / step, samples_per_s=speed, epoch=0))
        line = view.headline()
        ends.add(tuple(line.index(word) for word in ("/100", "epoch", "loss", "lr", " samples")))
    assert len(ends) == 1


@pytest.mark.parametrize(
    ("source", "interval", "line"),
    [
        ("given", [0.01, 0.01], "search_lr     0.2 s  learning rate 0.01 (given)"),
        (
            "searched",
            [0.0025, 0.04],
            "search_lr     0.2 s  learning rate 0.01 (0.0025 to 0.04, searched)",
        ),
    ],
)
def test_a_searched_learning_rate_has_an_interval_and_a_given_one_has_none(
    source: str, interval: list[float], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = {"learning_rate": 0.01, "interval": interval, "source": source}
    said = chain.step("search_lr").summary(summary)
    Watch()({"event": "step", "name": "search_lr", "state": "done", "seconds": 0.2, "line": said})
    assert capsys.readouterr().err.splitlines() == [line]


def test_a_failed_step_says_where_the_page_of_rejected_data_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = {"kind": "data_rejected", "message": "bad", "page": "file:///r/x/1/rejection.html"}
    Watch()({"event": "step", "name": "validate", "state": "failed", "error": error})
    lines = ["validate   failed", "page       file:///r/x/1/rejection.html"]
    assert capsys.readouterr().err.splitlines() == lines


def test_an_epoch_of_a_regression_shows_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"train_loss": 0.4, "loss": 0.5, "rmse": 23249.7, "mae": 812.25, "r2": 0.61}
    Watch()({"event": "epoch", "epoch": 0, "epochs": 9, **figures})
    line = "epoch   1  train loss 0.4000  loss 0.5000  rmse 23,250"
    assert capsys.readouterr().err.strip() == line


def _in_terminal(command: list[str], width: int) -> str:
    """What a program writes to a terminal of this width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, width, 0, 0))
    without = {"COLUMNS", "LINES"}
    environment = {name: value for name, value in os.environ.items() if name not in without}
    environment["TERM"] = "xterm-256color"
    process = subprocess.Popen(command, stdin=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    text = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            text += chunk
    except OSError:  # the other end is closed
        pass
    assert process.wait(60) == 0
    os.close(ours)
    return text.decode()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_terminal_is_updated_in_place_and_no_line_is_wider_than_it(width: int) -> None:
    long = "measuring small networks: " + ", ".join(f"convolution {n}" for n in range(20))
    events = [
        {"event": "step", "name": "estimate", "state": "started"},
        {"event": "calibrate", "message": long},
        {"event": "step", "name": "train", "state": "started"},
        {"event": "ranks", "devices": ["a/cpu0", "b/cpu0"]},
        event(1, 40000, [0, 1]),
        event(20000, 40000, [0, 1], samples_per_s=123456.0),
    ]
    seen = _in_terminal([sys.executable, "-c", SHOW, json.dumps(events)], width)
    assert all(text in seen for text in ("estimate", "a/cpu0", "step 20000/40000", "left"))
    assert "\x1b[1A" in seen or "\x1b[2K" in seen  # it overwrites its earlier lines
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", plain)]
    assert max(map(len, lines)) <= width
    places = {line.index("measuring") for line in lines if "measuring" in line}
    assert len(places) == 1  # a long note moves nothing


def test_a_file_gets_plain_lines() -> None:
    events = [
        {"event": "step", "name": "train", "state": "started"},
        event(1, 4, [0, 1]),
        event(2, 4, [0, 1]),
        {"event": "epoch", "epoch": 0, "loss": 0.5},
    ]
    command = [sys.executable, "-c", SHOW, json.dumps(events)]
    plain = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
    assert "\x1b" not in plain
    assert [line.split()[:2] for line in plain.splitlines()] == [["step", "1/4"], ["epoch", "1"]]
