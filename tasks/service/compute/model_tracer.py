"""Traces the models that clients name or send. Their code runs in the sandbox."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainwright.estimator.trace import source as model_source
from trainwright.infra.sandbox import SandboxLimits
from trainwright.infra.sandbox.client import scrubbed_environment
from trainwright.tasks.service.compute import sample_model
from trainwright.tasks.service.compute.async_sandbox import AsyncSandbox
from trainwright.tasks.service.compute.bounded_work import content_key
from trainwright.tasks.service.requests import SentModel, StructureRequest
from trainwright.tasks.service.served_files import ServedFiles
from trainwright.tasks.trace_request import TRACER, trace_request, traced_structure

_SAMPLE = Path(sample_model.__file__)


@dataclass(frozen=True)
class RequestedTrace:
    """A request for a structure, with the model's current source."""

    request: StructureRequest
    entry: str
    files: Mapping[str, bytes]

    @property
    def key(self) -> str:
        """The cache key: equal for equal request and source."""
        named = [part for name, data in sorted(self.files.items()) for part in (name, data)]
        settings = self.request.model_dump(mode="json", exclude={"model": {"files"}})
        return content_key("structure", json.dumps(settings, sort_keys=True), *named)


class ModelTracer:
    """Traces models in a sandbox whose server has already imported the necessary modules."""

    def __init__(self, served: ServedFiles, limits: SandboxLimits) -> None:
        sample = StructureRequest(model=SentModel(source=_SAMPLE.name))
        self._served = served
        self.sandbox = AsyncSandbox(
            TRACER,
            limits,
            confined=True,
            warm_up=_request(_SAMPLE.parent, _SAMPLE.name, sample),
            environment=scrubbed_environment(),
        )

    async def requested(self, request: StructureRequest) -> RequestedTrace:
        """The request with its model's source. Raises NotServed, BadInput."""
        model = request.model
        if model.files is not None:
            files = {name: text.encode() for name, text in model.files.items()}
            return RequestedTrace(request, model.source, files)
        path = await asyncio.to_thread(self._served.source, model.source)
        return RequestedTrace(request, *await asyncio.to_thread(model_source.snapshot, str(path)))

    async def trace(self, what: RequestedTrace) -> bytes:
        """The content of structure.json. Raises BadInput if the tracing fails."""
        folder = Path(tempfile.mkdtemp(prefix="trainwright-source-"))
        try:
            for name, data in what.files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
            request = _request(folder, what.entry, what.request)
            outcome = await self.sandbox.ask(request, readable=[folder])
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        structure = traced_structure(outcome, what.entry, self.sandbox.limits, {})
        return structure.model_dump_json().encode()


def _request(folder: Path, entry: str, what: StructureRequest) -> dict[str, object]:
    return trace_request(
        folder,
        entry,
        what.model.config,
        batch_size=what.batch_size,
        batch_spec=what.spec,
        optimizer=what.optimizer,
        precision=what.precision,
        accumulation=what.accumulation,
        label_smoothing=what.label_smoothing,
    )
