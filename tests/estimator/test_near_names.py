"""The name that was probably meant, at the end of an error's line."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwright.estimator.errors import BadInput
from trainwright.estimator.named_file import read_named
from trainwright.estimator.near_names import meant, meant_file
from trainwright.tasks.estimate.step import device_type_of
from trainwright.tasks.export.export_run import checked_kind
from trainwright.tasks.spec.documents import validated
from trainwright.tasks.spec.job import Job, require_templates

JOB = {"name": "j", "data": {"uri": "builtin:digits"}}


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("two-cpu", "; did you mean two-cpus?"),
        ("TWO-CPUS", "; did you mean two-cpus?"),
        ("gpus", ""),
        (None, ""),
        ("two-cpu" * 10**6, ""),
    ],
)
def test_the_nearest_known_name_is_offered(given: object, near: str) -> None:
    assert meant(given, ["lab", "two-cpus"]) == near


def test_a_missing_file_names_the_one_beside_it_that_was_meant(tmp_path: Path) -> None:
    (tmp_path / "digits.yaml").touch()
    with pytest.raises(BadInput, match=r"digit.yaml: no such file; did you mean digits.yaml\?$"):
        read_named(tmp_path / "digit.yaml")
    assert meant_file(tmp_path / "none" / "digits.yaml") == ""
    assert meant_file("a\0/b") == ""


def test_names_of_known_lists_are_offered() -> None:
    for wrong, near in (
        ({"train": {"backend": "horovood"}}, "did you mean horovod?"),
        ({"objective": {"minimize": "energie"}}, "did you mean energy?"),
    ):
        with pytest.raises(BadInput, match=near.replace("?", r"\?")):
            validated(Job, JOB | wrong, "job")
    with pytest.raises(BadInput, match=r"did you mean onnx-int8\?"):
        checked_kind("onnx-in8")
    with pytest.raises(BadInput, match=r"did you mean nvidia-a100-80gb\?"):
        device_type_of("nvidia-a100-80", None)
    job = validated(Job, JOB | {"recommend": {"templates": ["linaer"]}}, "job")
    with pytest.raises(BadInput, match=r"did you mean linear\?"):
        require_templates(job, "job")
