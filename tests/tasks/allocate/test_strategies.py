"""Strategies other than data parallel."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from plans import TWO, plan

from trainwright.tasks.allocate.plan.confidence import Triple
from trainwright.tasks.allocate.plan.configuration import Configuration, Limits
from trainwright.tasks.allocate.plan.placement import Placement
from trainwright.tasks.allocate.plan.search_space import SearchSpace
from trainwright.tasks.allocate.plan.topology import Topology
from trainwright.tasks.allocate.strategies import STRATEGIES, load_installed, strategy
from trainwright.tasks.errors import BadInput


def test_a_strategy_registers_with_a_cost_function() -> None:
    @strategy("half-price")
    def cost(
        topology: Topology, counts: Sequence[int], placement: Placement, batch: int
    ) -> Configuration | None:
        space = SearchSpace(topology, batch, 1, sum(counts))
        found = [one for one, _ in space.configure(counts, 1, "time", Limits())]
        if not found:
            return None
        half = found[0].cost._replace(
            duration_s=Triple(*(value / 2 for value in found[0].cost.duration_s))
        )
        return dataclasses.replace(found[0], cost=half)

    try:
        with pytest.raises(ValueError, match="registered already"):
            strategy("half-price")
        assert plan(TWO).strategy["name"] == "half-price"
    finally:
        del STRATEGIES["half-price"]
    assert plan(TWO).strategy["name"] == "data-parallel"


@pytest.mark.parametrize(
    ("source", "says"),
    [("STRATEGIES['own'] = data_parallel", None), ("1 / 0", "ZeroDivisionError")],
)
def test_an_installed_package_adds_its_strategy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, says: str | None
) -> None:
    module = "from trainwright.tasks.allocate.strategies import STRATEGIES, data_parallel\n"
    (tmp_path / "my_strategy.py").write_text(f"{module}{source}\n")
    installed = tmp_path / "mine-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[trainwright.strategies]\nown = my_strategy\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_strategy", raising=False)
    load_installed.cache_clear()
    try:
        if says is None:
            assert plan(TWO).feasible
            assert list(STRATEGIES) == ["data-parallel", "own"]
        else:
            with pytest.raises(BadInput, match=f"strategy own of mine: can't be loaded: {says}"):
                plan(TWO)
    finally:
        STRATEGIES.pop("own", None)
        load_installed.cache_clear()
