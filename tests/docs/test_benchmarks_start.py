"""Every command of docs/benchmarks.md starts."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator

import pytest
from doc_pages import BENCHMARKS, ROOT

TESTS = str(ROOT / "tests")
_COMMAND = re.compile(r"`(?:tests/benchmarks/(?:\w+/)*)?(\w+\.py)\b")
COMMANDS = sorted(set(_COMMAND.findall(BENCHMARKS.read_text())))


def _modules_of_tests() -> list[str]:
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    return [name for name, file in files.items() if str(file).startswith(TESTS)]


@pytest.fixture
def _as_a_command(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A script finds the modules beside it, and those that it makes findable; no others of tests.

    It runs in this process, which imports torch once for all of them.
    """
    for name in _modules_of_tests():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if not one.startswith(TESTS)])
    yield
    for name in _modules_of_tests():
        del sys.modules[name]


@pytest.mark.usefixtures("_as_a_command")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_says_what_it_measures(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (script,) = (ROOT / "tests/benchmarks").rglob(name)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(script.parent)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code in (0, None)
    assert "usage:" in capsys.readouterr().out
