"""Models whose code attacks the machine, sent to the service: refused or contained, in one line."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import doors
import psutil
import pytest
from hostile_models import ATTACKS, HEAD, LEFT_BEHIND, MEMORY_BYTES, SECRET, Attack, probing
from serving import model

from trainwright.tasks.errors import BadInput
from trainwright.tasks.service.auth import Caller
from trainwright.tasks.service.service import Service, ServiceLimits


@pytest.fixture(scope="module")
def refusal() -> Iterator[Callable[..., str]]:
    """Sends a model's code to a service, and returns the error's message."""
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv("TRAINWRIGHT_SERVICE_TOKEN", SECRET)
        service = Service(
            doors.settings(), ServiceLimits(at_once=1, trace_memory_bytes=MEMORY_BYTES)
        )
        sandbox = service.tracer.sandbox

        def refused(code: str, timeout_s: float = 40.0) -> str:
            sandbox.limits = replace(sandbox.limits, timeout_s=timeout_s)
            body = json.dumps({"model": model(code)}).encode()
            with pytest.raises(BadInput) as raised:
                runner.run(service.structure(body, Caller("run")))
            assert sandbox.protection == "own namespaces"
            return str(raised.value)

        yield refused
        service.close()


def test_a_model_reaches_nothing_outside_its_sandbox(
    refusal: Callable[..., str], tmp_path: Path
) -> None:
    with probing(tmp_path) as code:
        assert "raised RuntimeError: succeeded: nothing" in refusal(code)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_an_attack_is_contained_and_reported_in_one_line(
    refusal: Callable[..., str], attack: Attack
) -> None:
    message = refusal(HEAD + attack.code, attack.timeout_s)
    assert re.search(attack.says, message)
    assert "\n" not in message
    every = psutil.process_iter(["cmdline"])
    assert not [one for one in every if LEFT_BEHIND in (one.info["cmdline"] or ())]
