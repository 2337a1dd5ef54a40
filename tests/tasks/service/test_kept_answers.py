"""What the service keeps: an answer that was computed once is not computed again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import doors
import pytest
from serving import JOB, JOBS, SPEC

from trainwright.estimator.trace.source import BatchSpec
from trainwright.tasks.errors import Infeasible
from trainwright.tasks.extract import extract_model
from trainwright.tasks.service.auth import Client
from trainwright.tasks.service.service import Bounds, Service


def test_that_nothing_is_feasible_is_kept_like_any_other_answer(home: Path) -> None:
    model = {"source": str(JOBS / "cnn.py"), "config": {"width": 8}}
    structure = extract_model(
        model, doors.settings(), spec=BatchSpec.model_validate(SPEC)
    ).model_dump(mode="json")
    host = {"name": "far", "address": "10.0.0.1", "devices": [{"type": "nvidia-t4"}]}
    job = JOB | {
        "pool": {"name": "p", "hosts": [host]},
        "structure": structure,
        "rows": 1000,
        "objective": {"deadline": "1ms"},
    }
    body, client, computed = json.dumps(job).encode(), Client(role="read"), []

    async def twice() -> list[str]:
        service = Service(doors.settings(), Bounds(at_once=1))
        really = service.compute.ask

        async def counted(request: dict[str, Any]) -> bytes:
            computed.append(request["call"])
            return await really(request)

        service.compute.ask = counted  # type: ignore[method-assign]
        said = []
        try:
            for _ in range(2):
                with pytest.raises(Infeasible) as caught:
                    await service.plan(body, client)
                said.append(str(caught.value))
        finally:
            service.close()
        return said

    first, second = asyncio.run(twice())
    assert first == second
    assert "deadline of 0.001 s binds" in first
    assert computed == ["plan"]
