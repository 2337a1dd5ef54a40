"""The service's cache: it computes an answer only once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import doors
import pytest
from serving import JOB, JOBS, SPEC

from trainwright.estimator.trace.source import BatchSpec
from trainwright.infra.sandbox import SandboxLimits
from trainwright.tasks.errors import BadInput, Infeasible
from trainwright.tasks.extract import extract_model
from trainwright.tasks.service.auth import Caller
from trainwright.tasks.service.compute.async_sandbox import AsyncSandbox
from trainwright.tasks.service.service import Service, ServiceLimits


def test_who_may_only_read_gets_no_answer_that_takes_long_or_is_of_a_huge_structure(
    home: Path,
) -> None:
    model = {"source": str(JOBS / "cnn.py"), "config": {"width": 8}}
    spec = BatchSpec.model_validate(SPEC)
    structure = extract_model(model, doors.settings(), spec=spec).model_dump(mode="json")
    host = {"name": "far", "address": "10.0.0.1", "devices": [{"type": "nvidia-t4"}]}
    pool = {"name": "p", "hosts": [host]}
    job = JOB | {"pool": pool, "structure": structure, "rows": 1000}
    huge = job | {"structure": structure | {"units": structure["units"] * 2001}}

    async def refusals() -> list[str]:
        service = Service(doors.settings(), ServiceLimits(at_once=1, read_timeout_s=0.001))
        said = []
        try:
            for body in (job, huge):
                with pytest.raises(BadInput) as caught:
                    await service.plan(json.dumps(body).encode(), Caller(role="read"))
                said.append(str(caught.value))
        finally:
            service.close()
        return said

    slow, large = asyncio.run(refusals())
    assert "the work" in slow
    assert "0.001" in slow
    assert "2000 units at most" in large


def test_an_infeasible_plan_is_cached_like_any_other_answer(home: Path) -> None:
    model = {"source": str(JOBS / "cnn.py"), "config": {"width": 8}}
    spec = BatchSpec.model_validate(SPEC)
    structure = extract_model(model, doors.settings(), spec=spec).model_dump(mode="json")
    host = {"name": "far", "address": "10.0.0.1", "devices": [{"type": "nvidia-t4"}]}
    job = JOB | {
        "pool": {"name": "p", "hosts": [host]},
        "structure": structure,
        "rows": 1000,
        "objective": {"deadline": "1ms"},
    }
    body, caller = json.dumps(job).encode(), Caller(role="read")

    async def twice() -> list[str]:
        service = Service(doors.settings(), ServiceLimits(at_once=1))
        said = []
        try:
            for _ in range(2):
                with pytest.raises(Infeasible) as caught:
                    await service.plan(body, caller)
                said.append(str(caught.value))
                service.compute.close()
                service.compute = AsyncSandbox(  # a sandbox that can't compute
                    "no_such_module:answer",
                    SandboxLimits(1, 2**30),
                    confined=False,
                    warm_up={},
                    environment={},
                )
        finally:
            service.close()
        return said

    first, second = asyncio.run(twice())
    assert first == second
    assert "deadline of 0.001 s binds" in first
