"""Names the tests that failed in the run before and pass when they run again (--last-failed)."""

from __future__ import annotations

import pytest

FAILED_FIRST = pytest.StashKey[set[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep what failed in the run before: this run forgets it."""
    again = config.getoption("lf", default=False)
    config.stash[FAILED_FIRST] = set(config.cache.get("cache/lastfailed", {})) if again else set()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Write a line for each."""
    passed = {report.nodeid for report in terminalreporter.stats.get("passed", [])}
    for name in sorted(config.stash[FAILED_FIRST] & passed):
        terminalreporter.write_line(f"FAILED BESIDE OTHERS, PASSED ALONE {name}", yellow=True)
