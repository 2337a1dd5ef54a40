"""What the service answers, apart from HTTP: documents of the command line, made by fork servers, kept by content."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from trainwright.estimator.structure import Structure
from trainwright.estimator.trace import source as model_source
from trainwright.estimator.trace.source import BatchSpec
from trainwright.tasks.allocate.preview import held_devices
from trainwright.tasks.errors import BadInput, Infeasible, TrainwrightError, from_document
from trainwright.tasks.extract import batch_spec
from trainwright.tasks.leases.pool_status import pool_document
from trainwright.tasks.runs.artefacts import DataSchema
from trainwright.tasks.service import limits
from trainwright.tasks.service.auth import Client
from trainwright.tasks.service.compute.fork_client import ForkClient
from trainwright.tasks.service.compute.work import Cache, Work, content_key
from trainwright.tasks.service.records.boards import Boards
from trainwright.tasks.service.records.run_records import NotFound, Records
from trainwright.tasks.service.requests import (
    EstimateRequest,
    PlanRequest,
    SentModel,
    StructureRequest,
)
from trainwright.tasks.service.served_files import NotServed, ServedFiles
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.documents import validated
from trainwright.tasks.spec.eligibility import usable
from trainwright.tasks.spec.job import DataSpec, DeviceFilter, Optimizer
from trainwright.tasks.spec.pool import Pool

_FOREVER = float("inf")
PLAN_LIFETIME_S = 60.0  # a plan also depends on finished runs and calibrations, which change


@dataclass(frozen=True)
class Bounds:
    """How much the service does, and keeps."""

    at_once: int = max(1, len(os.sched_getaffinity(0)))
    waiting: int = 32
    timeout_s: float = 120.0  # a plan may have this machine measured first
    trace_memory_bytes: int = 8 * 2**30  # of address space: torch alone maps some GiB
    compute_memory_bytes: int = 4 * 2**30
    cache_bytes: int = 64 * 2**20


class Service:
    """Answers requests. One event loop's."""

    def __init__(
        self, settings: Settings, bounds: Bounds | None = None, folders: Sequence[Path] = ()
    ) -> None:
        bounds = bounds or Bounds()
        self._settings = settings
        self.receiver = limits.Receiver()
        self.served = ServedFiles(settings, folders)
        self.records = Records(settings)
        self.boards = Boards()
        self._cache = Cache(bounds.cache_bytes)
        self._work = Work(bounds.at_once, bounds.waiting)
        self.trace = ForkClient(
            "trace",
            settings,
            timeout_s=bounds.timeout_s,
            memory_limit_bytes=bounds.trace_memory_bytes,
        )
        self.compute = ForkClient(
            "compute",
            settings,
            timeout_s=bounds.timeout_s,
            memory_limit_bytes=bounds.compute_memory_bytes,
        )

    async def start(self) -> None:
        """Warm up, so that the first request is quick."""
        await asyncio.gather(self.trace.start(), self.compute.start(), self.records.start())

    def close(self) -> None:
        """End the fork servers."""
        self.trace.close()
        self.compute.close()
        self.records.close()
        self.boards.close()

    def kept(self, route: Literal["estimate", "plan"], body: bytes, client: Client) -> bytes | None:
        """The answer to a request that was answered before and holds all that its answer depends on."""
        return self._cache.get(content_key(route, client.role, body))

    async def structure(self, body: bytes, client: Client) -> bytes:
        """`trainwright extract --json`. Raises Forbidden without the right to start runs."""
        client.needs_run("a model's code")
        request = validated(StructureRequest, limits.parse(body), "request")
        return await self._structure(request.model, request, request.spec, slot=True)

    async def estimate(self, body: bytes, client: Client) -> bytes:
        """`trainwright estimate --json`."""
        raw = content_key("estimate", client.role, body)
        request = validated(EstimateRequest, limits.parse(body), "request")
        sent = request.model
        if sent is not None:
            client.needs_run("a model's code")

        async def work() -> bytes:
            structure: Structure | None = request.structure
            if sent is not None:
                what = StructureRequest(
                    model=sent,
                    batch_size=request.batch_size,
                    optimizer=request.optimizer,
                    precision=request.precision,
                )
                structure = Structure.model_validate_json(
                    await self._structure(sent, what, None, slot=False)
                )
            assert structure is not None
            return await self._computed(
                {
                    "call": "estimate",
                    "structure": structure.model_dump(mode="json"),
                    "batch_size": request.batch_size,
                    "device_type": request.device_type,
                    "calibration": request.calibration.model_dump(mode="json")
                    if request.calibration
                    else None,
                },
                _FOREVER,
            )

        answer = await self._work.do(raw, work)
        if sent is None:  # the answer depends on the request's content only
            self._cache.put(raw, answer, _FOREVER)
        return answer

    async def plan(self, body: bytes, client: Client) -> bytes:
        """`trainwright plan --json`; where nothing is feasible, what that prints."""
        raw = content_key("plan", client.role, body)
        request = validated(PlanRequest, limits.parse(body), "request")
        if request.model is not None:
            client.needs_run("a model's code")
        if (
            request.data_schema is None
            and request.rows is None
            and not request.data.uri.startswith("builtin:")
        ):
            client.needs_run("reading data")
        pool = (
            request.pool
            if isinstance(request.pool, Pool)
            else await asyncio.to_thread(self.served.pool, request.pool)
        )

        async def work() -> bytes:
            schema = await self._schema(request)
            structure: Structure | None = request.structure
            if request.model is not None:
                what = StructureRequest(
                    model=request.model,
                    optimizer=request.train.optimizer,
                    precision=request.train.precision,
                )
                answer = await self._structure(request.model, what, batch_spec(schema), slot=False)
                structure = Structure.model_validate_json(answer)
            assert structure is not None
            made = await self._computed(
                {
                    "call": "plan",
                    "job": request.job(),
                    "pool": pool.model_dump(mode="json") if request.pool else None,
                    "schema": schema.model_dump(mode="json"),
                    "structure": structure.model_dump(mode="json"),
                    "calibrations": [one.model_dump(mode="json") for one in request.calibrations],
                    "may_measure": client.role == "run",
                },
                PLAN_LIFETIME_S,
            )
            return await asyncio.to_thread(_with_held, made, pool, request.devices, self._settings)

        answer = await self._work.do(raw, work)
        if (
            request.structure is not None
            and (request.data_schema or request.rows)
            and not isinstance(request.pool, str)
        ):
            self._cache.put(raw, answer, PLAN_LIFETIME_S)
        return answer

    async def pool(self, name: str | None) -> bytes:
        """`trainwright pool --json`."""
        try:
            pool = await asyncio.to_thread(self.served.pool, name)
        except NotServed as error:
            raise NotFound(str(error)) from None
        return json.dumps(await asyncio.to_thread(pool_document, pool, self._settings)).encode()

    async def shelved(self) -> bytes:
        """The names of pools and models that clients may use."""
        pools, models = await asyncio.to_thread(self.served.names)
        return json.dumps({"pools": pools, "models": models}).encode()

    async def _schema(self, request: PlanRequest) -> DataSchema:
        if request.data_schema is not None:
            return request.data_schema
        if request.rows is not None:
            held_out = min(
                max(round(request.rows * request.data.validation_fraction), 1), request.rows - 1
            )
            return DataSchema(
                task=request.data.task or "custom",
                rows=request.rows,
                train_rows=request.rows - held_out,
                validation_rows=held_out,
                inputs={},
                input_dtypes={},
                target=request.data.target,
                target_dtype="",
                sha256="",
            )
        spec: DataSpec = await asyncio.to_thread(self.served.data, request.data)
        lifetime_s = _FOREVER if spec.uri.startswith("builtin:") else 0.0
        answer = await self._computed(
            {"call": "schema", "data": spec.model_dump(mode="json")}, lifetime_s
        )
        return DataSchema.model_validate_json(answer)

    async def _structure(
        self, model: SentModel, what: StructureRequest, spec: BatchSpec | None, *, slot: bool
    ) -> bytes:
        """A model's structure, from the cache or traced now: in a slot of its own, or in the one its caller has."""
        entry, files = model.source, model.files
        if files is None:
            path = await asyncio.to_thread(self.served.source, model.source)
            entry, found = await asyncio.to_thread(model_source.snapshot, str(path))
            files = {name: _text(name, data) for name, data in found.items()}
        optimizer: Optimizer = what.optimizer
        request = {
            "entry": entry,
            "files": files,
            "config": model.config,
            "batch_size": what.batch_size,
            "spec": spec.model_dump(mode="json") if spec else None,
            "optimizer": optimizer.model_dump(),
            "precision": what.precision,
            "accumulation": what.accumulation,
        }
        key = content_key("structure", json.dumps(request, sort_keys=True))

        async def work() -> bytes:
            answer = await self.trace.ask(request)
            try:
                structure = Structure.model_validate_json(_raised(answer))
            except ValidationError:
                raise BadInput(
                    f"model: {entry} wrote an answer of its own that is no structure"
                ) from None
            except TrainwrightError as error:  # whatever kind the model's process says it is
                raise BadInput(str(error)) from None
            return structure.model_dump_json().encode()

        kept = self._cache.get(key)
        if kept is None:
            kept = await (self._work.do(key, work) if slot else work())
            self._cache.put(key, kept, _FOREVER)
        return kept

    async def _computed(self, request: dict[str, Any], lifetime_s: float) -> bytes:
        key = content_key("computed", json.dumps(request, sort_keys=True))
        kept = self._cache.get(key)
        if kept is None:
            kept = await self.compute.ask(request)
            with contextlib.suppress(Infeasible):  # that nothing is feasible is an answer too
                _raised(kept)
            self._cache.put(key, kept, lifetime_s)
        return _raised(kept)


def _raised(answer: bytes) -> bytes:
    """The answer. Raises the error that it may be instead."""
    if answer.startswith(b'{"error"'):
        try:
            error = json.loads(answer)["error"]
            raise from_document({"kind": str(error["kind"]), **error})
        except (ValueError, LookupError, TypeError):
            raise BadInput("model: it wrote an answer of its own that can't be read") from None
    return answer


def _with_held(plan: bytes, pool: Pool, chosen: DeviceFilter, settings: Settings) -> bytes:
    """The plan with who holds the devices that the job may use."""
    held = held_devices(usable(pool, chosen), settings)
    document = json.loads(plan) | {
        "held": None if held is None else [one.model_dump(mode="json") for one in held]
    }
    return json.dumps(document).encode()


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BadInput(f"model.source: {name} is not UTF-8") from None
