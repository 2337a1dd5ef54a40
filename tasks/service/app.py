"""The REST routes: a FastAPI application that stands alone (`trainwright serve`) or is mounted in Airflow (`operators.plugin`).

| route | role | answers |
|---|---|---|
| POST /plans | read; run where code or data are read | as `plan --json`, also where nothing is feasible |
| POST /estimates | read; run with `model` | as `estimate --json` |
| POST /structures | run | structure.json, as `extract --json` |
| GET /pool?name=… | read | as `pool --json` |
| GET /pools | read | the names of the pools, and the models, in the folders that are served |
| GET /devices | read | the device types that are known |
| GET /runs?limit=&after=&job=&holder= | read | runs, newest first |
| GET /runs/{job}/{id} | read | as `show --json`, and the documents behind it, with what happened |
| GET /runs/{job}/{id}/metrics?from_step= | read | recorded rows from a step on, also while the run goes on (`tasks.live`) |
| GET /runs/{job}/{id}/structure, …/report | read | structure.json; the report |
| POST /runs/{job}/{id}/tensorboard | run | starts the run's TensorBoard and says where it is: /tensorboard/{secret}/… |
| GET /history?job= | read | each job's outcomes, and its finished runs |
| GET /page/… | read; alone: anybody | the page, which asks for the token itself |

A query's unknown fields are refused, as a body's are. Errors are `{"error": {"kind", "message"}}`: 401 nobody,
403 not allowed, 408 too slow, 413 too large,
422 bad input, 429 too much at once, 503 a needed service does not answer, 500 ours.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from trainwright.estimator.devices import DEVICE_TYPES
from trainwright.estimator.structure import Structure
from trainwright.tasks.errors import BadInput, Infeasible, TrainwrightError
from trainwright.tasks.service import schema
from trainwright.tasks.service.auth import Client, check_origin
from trainwright.tasks.service.compute.answers import error_document
from trainwright.tasks.service.documents import (
    DeviceTypes,
    ErrorAnswer,
    Infeasibility,
    PlanAnswer,
    PoolState,
    Shelved,
    StepEstimate,
)
from trainwright.tasks.service.records.pages import Guarded, Login
from trainwright.tasks.service.records.routes import (
    add_board_routes,
    add_page_routes,
    add_run_routes,
)
from trainwright.tasks.service.requests import EstimateRequest, PlanRequest, StructureRequest
from trainwright.tasks.service.service import Service
from trainwright.tasks.spec.documents import problems_line

log = logging.getLogger(__name__)

_STATUS = {
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "method_not_allowed": 405,
    "timeout": 408,
    "held": 409,
    "too_large": 413,
    "bad_input": 422,
    "data_rejected": 422,
    "busy": 429,
    "service_unreachable": 503,
}
_KINDS = {status: kind for kind, status in _STATUS.items() if kind != "data_rejected"}
_CLIENT_GONE = 499  # nobody reads it


def create_app(
    service: Service, client_of: Callable[..., Any], *, start: bool = True, login: Login = "token"
) -> FastAPI:
    """The application. `client_of` is the dependency that says who asks; with `start`, the service warms up and ends with it.

    The page asks for a token itself, where that is the `login`; otherwise it is shown to who is logged in.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if start:
            await service.start()
        try:
            yield
        finally:
            service.close()

    app = FastAPI(
        title="trainwright",
        version="1",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=lifespan,
        summary="Plans, estimates and structures of models on devices.",
        responses={status: {"model": ErrorAnswer} for status in (401, 403, 422)},
    )

    async def asking(request: Request, client: Annotated[Client, Depends(client_of)]) -> Client:
        """Who asks; what is asked has only fields that the route knows. Raises BadInput."""
        known = [
            one.alias for one in get_flat_dependant(request.scope["route"].dependant).query_params
        ]
        for name in request.query_params:
            if name not in known:
                allowed = ", ".join(known) or "no field"
                raise BadInput(f"{name[:80]!r}: unknown field of the query; allowed: {allowed}")
            if len(request.query_params.getlist(name)) > 1:
                raise BadInput(f"{name}: given more than once; allowed: one value")
        return client

    AnyClient = Annotated[Client, Depends(asking)]
    checked = [Depends(check_origin)]

    async def received(request: Request) -> bytes:
        if (
            request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
            != "application/json"
        ):
            raise BadInput("content-type: allowed: application/json")
        return await service.receiver.body(request.stream(), request.headers.get("content-length"))

    @app.post(
        "/plans",
        dependencies=checked,
        response_model=PlanAnswer | Infeasibility,
        **schema.body(PlanRequest),
    )
    async def plans(request: Request, client: AnyClient) -> Response:
        """The plan for a job: which devices, what shares, how long. Takes nothing."""
        body = await received(request)
        kept = service.kept("plan", body, client)
        return (
            _json(kept)
            if kept is not None
            else await _unless_gone(request, service.plan(body, client))
        )

    @app.post(
        "/estimates",
        dependencies=checked,
        response_model=StepEstimate,
        **schema.body(EstimateRequest),
    )
    async def estimates(request: Request, client: AnyClient) -> Response:
        """Time, memory and energy of a training step on a device type."""
        body = await received(request)
        kept = service.kept("estimate", body, client)
        return (
            _json(kept)
            if kept is not None
            else await _unless_gone(request, service.estimate(body, client))
        )

    @app.post(
        "/structures",
        dependencies=checked,
        response_model=Structure,
        **schema.body(StructureRequest),
    )
    async def structures(request: Request, client: AnyClient) -> Response:
        """A model's structure, read from its code: needs the right to start runs."""
        body = await received(request)
        return await _unless_gone(request, service.structure(body, client))

    @app.get(
        "/pool",
        response_model=PoolState,
        responses={404: {"model": ErrorAnswer, "description": "no such pool"}},
    )
    async def pool(
        client: AnyClient,
        name: Annotated[
            str | None, Query(max_length=200, description="left out: the server's machine")
        ] = None,
    ) -> Response:
        """A pool's devices and who holds them."""
        return _json(await service.pool(name))

    @app.get("/pools", response_model=Shelved)
    async def pools(client: AnyClient) -> Response:
        """What can be named: pools, and models, in the folders that are served."""
        return _json(await service.shelved())

    @app.get("/devices", response_model=DeviceTypes)
    async def devices(client: AnyClient) -> Response:
        """The device types that are known, with what their makers state."""
        return _json(_DEVICES)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi(client: AnyClient) -> Response:
        return _json(json.dumps(app.openapi()).encode())

    add_run_routes(app, service.records, AnyClient)
    anybody_known = Annotated[Client, Depends(client_of)]  # queries of pages are the pages' own
    add_board_routes(app, service, login, AnyClient, anybody_known)
    add_page_routes(app, login, anybody_known)
    app.add_middleware(Guarded)
    app.openapi = lambda: schema.openapi(app)  # type: ignore[method-assign]  # as FastAPI's documentation has it
    app.add_exception_handler(TrainwrightError, _ours)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _unexpected)
    return app


_DEVICES = json.dumps(
    {
        "devices": [
            {**dataclasses.asdict(one), "sources": one.sources} for one in DEVICE_TYPES.values()
        ]
    }
).encode()


async def _unless_gone(request: Request, answer: Awaitable[bytes]) -> Response:
    """The answer; cancelled when the client goes before it is there."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, leaving = asyncio.ensure_future(answer), asyncio.create_task(gone())
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return _json(work.result()) if work.done() else Response(status_code=_CLIENT_GONE)
    finally:
        for task in (work, leaving):
            task.cancel()
        await asyncio.gather(work, leaving, return_exceptions=True)


def _json(
    content: bytes | str, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(content, status, media_type="application/json", headers=headers)


async def _ours(_: Request, error: Exception) -> Response:
    assert isinstance(error, TrainwrightError)
    if isinstance(error, Infeasible):  # an answer like any other: the question was well put
        return _json(error_document(error))
    status = _STATUS.get(error.kind, 500)
    if status >= 500:
        log.error("%s", error)
    extra = {
        401: {"WWW-Authenticate": "Bearer"},
        429: {"Retry-After": "1"},
        503: {"Retry-After": "10"},
    }.get(status)
    return _json(error_document(error), status, extra)


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    document = {
        "error": {"kind": _KINDS.get(error.status_code, "failed"), "message": str(error.detail)}
    }
    return _json(json.dumps(document), error.status_code, dict(error.headers or {}))


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [
        {**one, "loc": one["loc"][1:]} for one in error.errors()
    ]  # without where it was: query, path
    return _json(error_document(BadInput(problems_line(problems))), 422)


async def _unexpected(_: Request, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    return _json(
        error_document(TrainwrightError(f"{type(error).__name__}: the service's log has more")), 500
    )
