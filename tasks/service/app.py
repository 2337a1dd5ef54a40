"""The REST routes: a FastAPI application, for `trainwright serve` or mounted in Airflow.

| route | role | answers |
|---|---|---|
| POST /plans | read; run if it reads code or data | as `plan --json`, also if infeasible |
| POST /recommendations | run | as `recommend --json` |
| POST /estimates | read; run with `model` | as `estimate --json` |
| POST /structures | run | structure.json, as `extract --json` |
| GET /pool?name=… | read | as `pool --json`, with hosts that runs wait for |
| GET /pools | read | the names of pools and models in the served folders |
| GET /devices | read | the known device types |
| GET /runs?limit=&after=&job=&holder= | read | runs, newest first |
| GET /runs/{job}/{id} | read | as `show --json`, with its documents and events |
| GET /runs/{job}/{id}/metrics?from_step= | read | recorded rows, also of a live run |
| GET /runs/{job}/{id}/structure, …/report | read | structure.json; the report |
| GET /runs/{job}/{id}/timeline | read | a step of its plan, rank by rank, as SVG |
| GET /runs/{job}/{id}/rejection | read | the page of rejected data |
| POST /runs/{job}/{id}/tensorboard | run | starts the run's TensorBoard; its path |
| GET, POST /tensorboard/{secret}/… | the secret | a running TensorBoard |
| GET /history?job= | read | the outcomes of each job, and its finished runs |
| GET /openapi.json | read | this API in OpenAPI's format |
| GET /page/… | read; `serve`: public | the page, which asks for the token itself |

Unknown fields are refused, in a query as in a body. Errors are `{"error": {"kind", "message"}}`:
401 not logged in, 403 not allowed, 408 too slow, 413 too large, 422 bad input, 429 too many
requests, 503 a needed service does not answer, 500 a failure of the service.
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
from trainwright.tasks.service.answer_models import (
    DeviceTypes,
    ErrorAnswer,
    Infeasibility,
    PlanAnswer,
    PoolState,
    RecommendationAnswer,
    ServedNames,
    StepEstimate,
)
from trainwright.tasks.service.auth import Caller, check_origin
from trainwright.tasks.service.compute.answers import error_document
from trainwright.tasks.service.records.pages import Guarded, Login
from trainwright.tasks.service.records.routes import (
    add_page_routes,
    add_run_routes,
    add_tensorboard_routes,
)
from trainwright.tasks.service.requests import (
    EstimateRequest,
    PlanRequest,
    RecommendRequest,
    StructureRequest,
)
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
_CLIENT_CLOSED_REQUEST = 499  # the client has gone


def create_app(
    service: Service, caller_of: Callable[..., Any], *, start: bool = True, login: Login = "token"
) -> FastAPI:
    """The application. `caller_of` is the dependency that identifies the caller.

    With `start`, the service starts and ends with the application. With `login="token"` the page
    itself asks for the token; otherwise only logged-in users see it.
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

    async def checked_caller(
        request: Request, caller: Annotated[Caller, Depends(caller_of)]
    ) -> Caller:
        """The caller. Raises BadInput if the query has fields that the route does not know."""
        known = [
            one.alias for one in get_flat_dependant(request.scope["route"].dependant).query_params
        ]
        for name in request.query_params:
            if name not in known:
                allowed = ", ".join(known) or "no field"
                raise BadInput(f"{name[:80]!r}: unknown field of the query; allowed: {allowed}")
            if len(request.query_params.getlist(name)) > 1:
                raise BadInput(f"{name}: given more than once; allowed: one value")
        return caller

    AnyCaller = Annotated[Caller, Depends(checked_caller)]
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
    async def plans(request: Request, caller: AnyCaller) -> Response:
        """The plan for a job: devices, shares, duration. Takes no device."""
        body = await received(request)
        kept = service.kept("plan", body, caller)
        return (
            _json(kept)
            if kept is not None
            else await _unless_disconnected(request, service.plan(body, caller))
        )

    @app.post(
        "/recommendations",
        dependencies=checked,
        response_model=RecommendationAnswer | Infeasibility,
        **schema.body(RecommendRequest),
    )
    async def recommendations(request: Request, caller: AnyCaller) -> Response:
        """Models for a job's data, ranked, and the code of the first one."""
        body = await received(request)
        return await _unless_disconnected(request, service.recommend(body, caller))

    @app.post(
        "/estimates",
        dependencies=checked,
        response_model=StepEstimate,
        **schema.body(EstimateRequest),
    )
    async def estimates(request: Request, caller: AnyCaller) -> Response:
        """Time, memory and energy of a training step on a device type."""
        body = await received(request)
        kept = service.kept("estimate", body, caller)
        return (
            _json(kept)
            if kept is not None
            else await _unless_disconnected(request, service.estimate(body, caller))
        )

    @app.post(
        "/structures",
        dependencies=checked,
        response_model=Structure,
        **schema.body(StructureRequest),
    )
    async def structures(request: Request, caller: AnyCaller) -> Response:
        """A model's structure, from its code. Needs the right to start runs."""
        body = await received(request)
        return await _unless_disconnected(request, service.structure(body, caller))

    @app.get(
        "/pool",
        response_model=PoolState,
        responses={404: {"model": ErrorAnswer, "description": "no such pool"}},
    )
    async def pool(
        caller: AnyCaller,
        name: Annotated[
            str | None, Query(max_length=200, description="default: the server's machine")
        ] = None,
    ) -> Response:
        """A pool's devices and their holders."""
        return _json(await service.pool(name))

    @app.get("/pools", response_model=ServedNames)
    async def pools(caller: AnyCaller) -> Response:
        """The names of pools and models in the served folders."""
        return _json(await service.served_names())

    @app.get("/devices", response_model=DeviceTypes)
    async def devices(caller: AnyCaller) -> Response:
        """The known device types, with their datasheets' figures."""
        return _json(_DEVICES)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi(caller: AnyCaller) -> Response:
        return _json(json.dumps(app.openapi()).encode())

    add_run_routes(app, service.records, AnyCaller)
    LoggedIn = Annotated[
        Caller, Depends(caller_of)
    ]  # with any query, because the page defines its own
    add_tensorboard_routes(app, service, login, AnyCaller, LoggedIn)
    add_page_routes(app, login, LoggedIn)
    app.add_middleware(Guarded)
    # FastAPI's documented way to extend the document
    app.openapi = lambda: schema.openapi(app)  # type: ignore[method-assign]
    app.add_exception_handler(TrainwrightError, _trainwright_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(Exception, _unexpected_error)
    return app


_DEVICES = json.dumps(
    {
        "devices": [
            {**dataclasses.asdict(one), "sources": one.sources} for one in DEVICE_TYPES.values()
        ]
    }
).encode()


async def _unless_disconnected(request: Request, answer: Awaitable[bytes]) -> Response:
    """The answer. A client that disconnects cancels it."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, leaving = asyncio.ensure_future(answer), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return _json(work.result()) if work.done() else Response(status_code=_CLIENT_CLOSED_REQUEST)
    finally:
        for task in (work, leaving):
            task.cancel()
        await asyncio.gather(work, leaving, return_exceptions=True)


def _json(
    content: bytes | str, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(content, status, media_type="application/json", headers=headers)


async def _trainwright_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, TrainwrightError)
    if isinstance(error, Infeasible):  # an answer: the request was valid
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


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    document = {
        "error": {"kind": _KINDS.get(error.status_code, "failed"), "message": str(error.detail)}
    }
    return _json(json.dumps(document), error.status_code, dict(error.headers or {}))


async def _invalid_request(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # The first part of a location is the place of the field: query or path.
    problems = [{**one, "loc": one["loc"][1:]} for one in error.errors()]
    return _json(error_document(BadInput(problems_line(problems))), 422)


async def _unexpected_error(_: Request, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    return _json(
        error_document(TrainwrightError(f"{type(error).__name__}: see the service's log")), 500
    )
