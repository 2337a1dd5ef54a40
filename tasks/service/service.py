"""The service's answers, apart from HTTP: the command line's documents, cached by content."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from trainwright.estimator.structure import Structure
from trainwright.infra.sandbox import SandboxLimits
from trainwright.tasks.allocate.preview import held_devices
from trainwright.tasks.errors import BadInput, Infeasible, from_document
from trainwright.tasks.extract import batch_spec
from trainwright.tasks.leases.pool_status import cluster_state, pool_document
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.service import limits
from trainwright.tasks.service.asked_run import AskedRun, asked_run
from trainwright.tasks.service.auth import Caller
from trainwright.tasks.service.cluster_states import ClusterStates
from trainwright.tasks.service.compute.async_sandbox import AsyncSandbox
from trainwright.tasks.service.compute.bounded_work import BoundedWork, Cache, content_key
from trainwright.tasks.service.compute.model_tracer import ModelTracer
from trainwright.tasks.service.records.run_records import NotFound, Records
from trainwright.tasks.service.records.tensorboards import TensorBoards
from trainwright.tasks.service.requests import (
    EstimateRequest,
    PlanRequest,
    RecommendRequest,
    SentSpec,
    StructureRequest,
)
from trainwright.tasks.service.served_files import NotServed, ServedFiles
from trainwright.tasks.settings import SERVICE_SECRETS, Settings
from trainwright.tasks.spec.documents import validated
from trainwright.tasks.spec.eligibility import usable
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Pool
from trainwright.tasks.spec.recipe import given_fields
from trainwright.tasks.spec.train_spec import LAYOUT_WORDS

_FOREVER = float("inf")
PLAN_LIFETIME_S = 60.0
"""short, because the answer also depends on finished runs and calibrations, which change"""


@dataclass(frozen=True)
class ServiceLimits:
    """Bounds on the service's concurrent work and its cache."""

    at_once: int = max(1, len(os.sched_getaffinity(0)))
    waiting: int = 32
    timeout_s: float = 120.0
    """of one request; long, because a plan may measure this machine first"""
    read_timeout_s: float = 20.0
    """of one request of a caller who may only read, which measures nothing"""
    trace_memory_bytes: int = 8 * 2**30
    """of address space, of which torch alone maps several GiB"""
    compute_memory_bytes: int = 4 * 2**30
    compute_file_bytes: int = 4 * 2**30
    """of a file of fetched or prepared data"""
    cache_bytes: int = 64 * 2**20


class Service:
    """Answers requests, for one event loop."""

    def __init__(
        self,
        settings: Settings,
        capacity: ServiceLimits | None = None,
        folders: Sequence[Path] = (),
    ) -> None:
        capacity = capacity or ServiceLimits()
        self._settings = settings
        self._read_timeout_s = min(capacity.read_timeout_s, capacity.timeout_s)
        self.receiver = limits.Receiver()
        self.served = ServedFiles(settings, folders)
        self.records = Records(settings)
        self.tensorboards = TensorBoards()
        self._clusters = ClusterStates(partial(cluster_state, settings=settings))
        self._cache = Cache(capacity.cache_bytes)
        self._work = BoundedWork(capacity.at_once, capacity.waiting)
        self.tracer = ModelTracer(
            self.served, SandboxLimits(capacity.timeout_s, capacity.trace_memory_bytes)
        )
        self.compute = AsyncSandbox(
            "trainwright.tasks.service.compute.answers:answer",
            SandboxLimits(
                capacity.timeout_s,
                capacity.compute_memory_bytes,
                disk_bytes=capacity.compute_file_bytes,
            ),
            confined=False,
            warm_up={"call": "warm_up"},
            environment=_compute_environment(settings),
        )

    async def start(self) -> None:
        """Warm up, so that the first request is fast."""
        await asyncio.gather(
            self.tracer.sandbox.start(), self.compute.start(), self.records.start()
        )

    def close(self) -> None:
        """End all processes and threads that it started."""
        self.tracer.sandbox.close()
        self.compute.close()
        self.records.close()
        self.tensorboards.close()

    def kept(self, route: Literal["estimate", "plan"], body: bytes, caller: Caller) -> bytes | None:
        """The cached answer to a request, if it depends only on the request's content."""
        return self._cache.get(content_key(route, caller.role, body))

    async def structure(self, body: bytes, caller: Caller) -> bytes:
        """`trainwright extract --json`. Raises Forbidden without the right to start runs."""
        caller.needs_run("a model's code")
        request = validated(StructureRequest, limits.parse(body), "request")
        return await self._structure(request, slot=True)

    async def estimate(self, body: bytes, caller: Caller) -> bytes:
        """`trainwright estimate --json`."""
        key = content_key("estimate", caller.role, body)
        request = validated(EstimateRequest, limits.parse(body), "request")
        if request.model is not None:
            caller.needs_run("a model's code")
        answer = await self._work.do(key, partial(self._estimate, request, caller))
        if request.model is None:  # then the answer depends only on the request
            self._cache.put(key, answer, _FOREVER)
        return answer

    async def _estimate(self, request: EstimateRequest, caller: Caller) -> bytes:
        structure: Structure | None = request.structure
        if request.model is not None:
            traced = StructureRequest(
                model=request.model,
                batch_size=request.batch_size,
                optimizer=request.optimizer,
                precision=request.precision,
            )
            structure = Structure.model_validate_json(await self._structure(traced, slot=False))
        assert structure is not None
        calibration = request.calibration
        asked = {
            "call": "estimate",
            "structure": structure.model_dump(mode="json"),
            "batch_size": request.batch_size,
            "device_type": request.device_type,
            "calibration": calibration.model_dump(mode="json") if calibration else None,
        }
        return await self._computed(asked, _FOREVER, caller)

    async def plan(self, body: bytes, caller: Caller) -> bytes:
        """`trainwright plan --json`, also if nothing is feasible."""
        key = content_key("plan", caller.role, body)
        request = validated(PlanRequest, limits.parse(body), "request")
        if request.model is not None:
            caller.needs_run("a model's code")
        asked = None
        if request.run is not None:
            asked = await asyncio.to_thread(asked_run, self.records, request)
        schema_given = request.data_schema is not None or request.rows is not None
        reads_data = asked is None and not schema_given
        if reads_data and not request.data.uri.startswith("builtin:"):
            caller.needs_run("reading data")
        if isinstance(request.pool, Pool):
            pool: Pool = request.pool
        elif asked is not None and "pool" not in request.model_fields_set:
            pool = await asyncio.to_thread(asked.pool_for, caller, self.served)
        else:
            pool = await asyncio.to_thread(self.served.pool, request.pool)
        answer = await self._work.do(key, partial(self._plan, request, pool, caller, asked))
        if request.structure is not None and schema_given and not isinstance(request.pool, str):
            self._cache.put(key, answer, PLAN_LIFETIME_S)
        return answer

    async def _plan(
        self, request: PlanRequest, pool: Pool, caller: Caller, run: AskedRun | None
    ) -> bytes:
        schema = await self._schema(request, caller) if run is None else run.schema
        structure: Structure | None = request.structure if run is None else run.structure
        if request.model is not None:
            traced = StructureRequest(
                model=request.model,
                optimizer=request.train.optimizer,
                precision=request.train.precision,
                label_smoothing=request.train.label_smoothing,
                spec=SentSpec.model_validate(batch_spec(schema).model_dump()),
            )
            structure = Structure.model_validate_json(await self._structure(traced, slot=False))
        assert structure is not None
        asked = {
            "call": "plan",
            "job": request.job(),
            "pool": pool.model_dump(mode="json") if request.pool or run is not None else None,
            "estimate": run.estimate.model_dump(mode="json") if run and run.estimate else None,
            "schema": schema.model_dump(mode="json"),
            "structure": structure.model_dump(mode="json"),
            "calibrations": [one.model_dump(mode="json") for one in request.calibrations],
            "may_measure": caller.role == "run",
        }
        plan = await self._computed(asked, PLAN_LIFETIME_S, caller)
        return await asyncio.to_thread(_with_held, plan, pool, request, self._settings)

    async def recommend(self, body: bytes, caller: Caller) -> bytes:
        """`trainwright recommend --json`. Raises Forbidden without the right to start runs."""
        caller.needs_run("reading data")
        key = content_key("recommend", caller.role, body)
        request = validated(RecommendRequest, limits.parse(body), "request")
        if isinstance(request.pool, Pool):
            pool: Pool = request.pool
        else:
            pool = await asyncio.to_thread(self.served.pool, request.pool)
        return await self._work.do(key, partial(self._recommend, request, pool, caller))

    async def _recommend(self, request: RecommendRequest, pool: Pool, caller: Caller) -> bytes:
        data = await asyncio.to_thread(self.served.data, request.data)
        asked = {
            "job": request.job() | {"data": data.model_dump(mode="json")},
            "given": given_fields(request),
            "pool": pool.model_dump(mode="json") if request.pool else None,
            "calibrations": [one.model_dump(mode="json") for one in request.calibrations],
        }
        offered = json.loads(await self._computed(asked | {"call": "offers"}, 0.0, caller))
        structures = {}
        for one in offered:
            traced = validated(StructureRequest, one["request"], "request")
            structures[one["name"]] = json.loads(await self._structure(traced, slot=False))
        ranked = {**asked, "call": "recommend", "structures": structures}
        return await self._computed(ranked, 0.0, caller)

    async def pool(self, name: str | None) -> bytes:
        """`trainwright pool --json`, and the hosts that runs wait for. Raises NotFound.

        A cluster that is slow does not delay it (`ClusterStates`).
        """
        try:
            pool = await asyncio.to_thread(self.served.pool, name)
        except NotServed as error:
            raise NotFound(str(error)) from None
        document = await asyncio.to_thread(pool_document, pool, self._settings)
        hosts, cluster = [], None
        if name is not None and pool.engine != "ssh":
            hosts, cluster = await asyncio.gather(
                self.records.waiting_hosts(Path(name).stem), self._clusters.of(name, pool)
            )
        return json.dumps(document | {"waiting_hosts": hosts, "cluster": cluster}).encode()

    async def served_names(self) -> bytes:
        """The pools and models in the served folders, and the layouts that a job may name."""
        pools, models = await asyncio.to_thread(self.served.names)
        return json.dumps({"pools": pools, "models": models, "layouts": LAYOUT_WORDS}).encode()

    async def _schema(self, request: PlanRequest, caller: Caller) -> DataSchema:
        if request.data_schema is not None:
            return request.data_schema
        if request.rows is not None:
            return _schema_of_rows(request, request.rows)
        spec = await asyncio.to_thread(self.served.data, request.data)
        lifetime_s = _FOREVER if spec.uri.startswith("builtin:") else 0.0
        asked = {"call": "schema", "data": spec.model_dump(mode="json")}
        return DataSchema.model_validate_json(await self._computed(asked, lifetime_s, caller))

    async def _structure(self, request: StructureRequest, *, slot: bool) -> bytes:
        """A model's structure, cached or traced now, in its own slot or in its caller's."""
        model = await self.tracer.requested(request)
        kept = self._cache.get(model.key)
        if kept is None:
            traced = partial(self.tracer.trace, model)
            kept = await (self._work.do(model.key, traced) if slot else traced())
            self._cache.put(model.key, kept, _FOREVER)
        return kept

    async def _computed(self, request: dict[str, Any], lifetime_s: float, caller: Caller) -> bytes:
        key = content_key("computed", json.dumps(request, sort_keys=True))
        kept = self._cache.get(key)
        if kept is None:
            bounds = self.compute.limits
            if caller.role == "read":
                bounds = dataclasses.replace(bounds, timeout_s=self._read_timeout_s)
            outcome = await self.compute.ask(request, limits=bounds)
            if not outcome.answer:
                raise BadInput(f"request: the work {outcome.failure(bounds)}")
            kept = outcome.answer
            with contextlib.suppress(Infeasible):  # an answer too
                _raised(kept)
            self._cache.put(key, kept, lifetime_s)
        return _raised(kept)


def _raised(answer: bytes) -> bytes:
    """The answer. If it is an error, raises that."""
    if answer.startswith(b'{"error"'):
        raise from_document(json.loads(answer)["error"])
    return answer


def _compute_environment(settings: Settings) -> dict[str, str]:
    """The settings without the callers' tokens, for access to the store and the ledger."""
    secrets = SERVICE_SECRETS.values()
    return {name: text for name, text in settings.environment().items() if name not in secrets}


def _schema_of_rows(request: PlanRequest, rows: int) -> DataSchema:
    """The schema of data if only the number of rows is known."""
    held_out = min(max(round(rows * request.data.validation_fraction), 1), rows - 1)
    return DataSchema(
        task=request.data.task or "custom",
        rows=rows,
        train_rows=rows - held_out,
        validation_rows=held_out,
        inputs={},
        input_dtypes={},
        target=request.data.target,
        target_dtype="",
        sha256="",
    )


def _with_held(plan: bytes, pool: Pool, job: Job, settings: Settings) -> bytes:
    """The plan, with the holders of the devices that the job may use."""
    held = held_devices(usable(pool, job), settings)
    document = json.loads(plan) | {
        "held": None if held is None else [one.model_dump(mode="json") for one in held]
    }
    return json.dumps(document).encode()
