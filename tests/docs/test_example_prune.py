"""The example of runs.md deletes old runs that nothing needs, and no others."""

from __future__ import annotations

from pathlib import Path

import doors
import pytest
from doc_pages import DOCS, example
from finished_run import begin_run

from trainwright.tasks.runs.alias import Alias, alias_key
from trainwright.tasks.runs.listing import row_of
from trainwright.tasks.runs.run import list_runs
from trainwright.tasks.storage.connect import open_store


def test_old_runs_are_deleted_but_those_that_may_go_on_or_that_an_alias_names(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = (tmp_path / "store").as_uri()
    monkeypatch.setenv("TRAINWRIGHT_STORE", uri)
    runs = [begin_run(uri, "nightly", number) for number in range(1, 6)]
    for run, state in zip(
        runs, ("failed", "success", "interrupted", "success", "success"), strict=True
    ):
        run.note(state=state, step=None)
    alias = Alias(
        alias="production", job="nightly", run=runs[1].uri, metrics={}, promoted_at="2026-11-27"
    )
    store = open_store(uri, doors.settings())
    store.put(alias_key("nightly", "production"), alias.model_dump_json().encode())
    code = example(DOCS / "how-to" / "runs.md", "prune")
    exec(code.replace("KEEP = 10", "KEEP = 1"), {})
    left = {run.id for run in list_runs(uri, doors.settings()) if row_of(run)}
    assert left == {runs[number].id for number in (1, 2, 4)}
