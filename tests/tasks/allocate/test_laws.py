"""Laws that every plan keeps; `tests/benchmarks/planner/laws.py` explains and checks more cases."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from laws import limited_cases, violations
from planner_cases import Case


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(limited_cases())
def test_no_plan_breaks_a_law(drawn: tuple[Case, float]) -> None:
    assert list(violations(*drawn)) == []
