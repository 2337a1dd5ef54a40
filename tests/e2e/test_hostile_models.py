"""Models whose code attacks the machine, on the command line: refused or contained, in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import psutil
import pytest
from command_line import TRAINWRIGHT, run
from hostile_models import ATTACKS, HEAD, LEFT_BEHIND, MEMORY_BYTES, SECRET, probing

# In a user namespace that permits no further ones, the kernel refuses the sandbox's.
WITHOUT_NAMESPACES = [
    *("unshare", "--user", "--map-root-user", "sh", "-c"),
    'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"',
    "sh",
]


def _refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("trainwright: model")
    assert "Traceback" not in done.stderr
    assert f"trainwright: {json.loads(done.stdout)['error']['message']}" == line
    return line


def _source(folder: Path, code: str) -> str:
    (folder / "source").mkdir()
    (folder / "source" / "model.py").write_text(code)
    return str(folder / "source" / "model.py")


def _left_behind() -> list[psutil.Process]:
    every = psutil.process_iter(["cmdline"])
    return [one for one in every if LEFT_BEHIND in (one.info["cmdline"] or ())]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of the user that models must not access."""
    (tmp_path / "outside").mkdir()
    return tmp_path / "outside"


@pytest.mark.parametrize(
    ("around", "protection"),
    [
        ([], ""),
        (["unshare", "--user", "--map-user=1000", "--map-group=1000"], ""),
        (WITHOUT_NAMESPACES, "weaker protection (Landlock and audit hook)"),
    ],
    ids=["own namespaces", "own namespaces of a user without rights", "fallback"],
)
def test_a_model_reaches_nothing_outside_its_sandbox(
    around: list[str], protection: str, outside: Path, tmp_path: Path
) -> None:
    environment = os.environ | {"HOME": str(outside), "TRAINWRIGHT_HOME": str(outside), "S": SECRET}
    with probing(outside) as code:
        command = [*around, *TRAINWRIGHT, "extract", _source(tmp_path, code), "--json"]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=200, check=False
        )
        assert "raised RuntimeError: succeeded: nothing" in _refused(done)
    assert protection in done.stderr
    assert ("weaker protection" in done.stderr) == bool(protection)


def test_without_namespaces_landlock_protects_files_from_code_that_bypasses_the_audit_hook(
    outside: Path, tmp_path: Path
) -> None:
    (outside / "credentials").write_text(SECRET)
    code = f"""
import _posixsubprocess
command = [b"/bin/sh", b"-c", b"cat {outside}/credentials; echo x > {outside}/written"]
read, write = os.pipe()
_posixsubprocess.fork_exec(command, [b"/bin/sh"], True, (), None, None, -1, -1, -1, -1, -1, -1,
    read, write, False, False, 0, None, None, None, -1, None, False)
os.wait()
os._exit(5)
"""
    command = [*WITHOUT_NAMESPACES, *TRAINWRIGHT, "extract", _source(tmp_path, HEAD + code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert "Permission denied" in done.stderr
    assert SECRET not in done.stderr
    assert not (outside / "written").exists()


def test_without_namespaces_the_disk_limit_holds_too(tmp_path: Path) -> None:
    attack = ATTACKS["fills the disk"]
    (tmp_path / "temporary").mkdir()
    done = subprocess.run(
        [*WITHOUT_NAMESPACES, *TRAINWRIGHT, "extract", _source(tmp_path, HEAD + attack.code)],
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path / "temporary")},
        timeout=200,
        check=False,
    )
    assert "wrote more than the 256 MiB allowed" in done.stderr
    assert list((tmp_path / "temporary").iterdir()) == []


# The others run in the service's tests, by the same sandbox.
@pytest.mark.parametrize("name", ["leaves a child", "runs forever", "fills the disk"])
def test_an_attack_is_contained_and_reported_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = ATTACKS[name]
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    limits = {
        "TRAINWRIGHT_EXTRACT_TIMEOUT_S": str(attack.timeout_s),
        "TRAINWRIGHT_EXTRACT_MEMORY_GIB": str(MEMORY_BYTES / 2**30),
    }
    source = _source(tmp_path, HEAD + attack.code)
    done = run("extract", source, "--json", **limits, TMPDIR=str(tmp_path / "temporary"))
    assert re.search(attack.says, _refused(done))
    assert not _left_behind()
    assert list((tmp_path / "temporary").iterdir()) == []
