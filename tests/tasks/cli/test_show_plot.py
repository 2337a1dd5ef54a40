"""`show RUN --plot` draws the plan of a stored run."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_line import run as run_command
from finished_run import begin_run, finished_training
from layout_plans import HEAVY, plan_and_estimate


def test_a_stored_runs_plan_is_drawn_with_a_timeline(tmp_path: Path) -> None:
    run = finished_training(f"file://{tmp_path / 'store'}")
    for artefact in plan_and_estimate(HEAVY):
        run.write(artefact)
    saved = tmp_path / "timeline.svg"
    done = run_command("show", run.uri, "--plot", str(saved))
    assert done.returncode == 0
    assert done.stderr == f"saved to {saved}\n"
    texts = [one.text for one in ElementTree.parse(saved).iter("{http://www.w3.org/2000/svg}text")]
    assert "one step, rank by rank" in texts


def test_a_run_whose_estimate_has_no_layers_says_so_in_one_line(tmp_path: Path) -> None:
    run = finished_training(f"file://{tmp_path / 'store'}")
    saved = tmp_path / "timeline.svg"
    done = run_command("show", run.uri, "--plot", str(saved))
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"saved to {saved}; timeline: none, as the estimate does not say what")
    assert saved.exists()


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("timeline.svg", "has no plan yet"),
        ("timeline.png", "allowed: a file that ends in .svg or .html"),
        ("nowhere/timeline.svg", "can't be written (there is no folder "),
        ("notes.svg", "exists and is not a plot of a plan"),
    ],
)
def test_a_run_without_a_plan_and_a_bad_path_are_refused_in_one_line(
    tmp_path: Path, file: str, says: str
) -> None:
    run = begin_run(f"file://{tmp_path / 'store'}", "small", 1)
    (tmp_path / "notes.svg").write_text("<svg/>")
    done = run_command("show", run.uri, "--plot", str(tmp_path / file))
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith("trainwright: --plot: ")
    assert says in line
    assert not (tmp_path / "timeline.svg").exists()
