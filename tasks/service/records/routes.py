"""The routes of runs, TensorBoards and the page. They check names before they read anything."""

import asyncio
import json
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Depends, FastAPI, Path, Query, Request, Response
from fastapi.responses import RedirectResponse

from trainwright.estimator.structure import Structure
from trainwright.tasks.runs.listing import ID_PATTERN, JOB_PATTERN, MOST_ROWS, RunPage
from trainwright.tasks.service.answer_models import (
    ErrorAnswer,
    History,
    Opened,
    Recorded,
    RunDocument,
)
from trainwright.tasks.service.auth import check_origin
from trainwright.tasks.service.records.pages import Login, missing_report, page_file
from trainwright.tasks.service.records.run_records import NotFound, Records
from trainwright.tasks.spec.documents import matching

_OF_JOB = "a job's name: 1 to 63 lower-case letters, digits and -"
_OF_RUN = "a run's name, such as 20261125T120000Z-0a1b2c"
JobInPath = Annotated[str, matching(JOB_PATTERN, _OF_JOB, Path)]
RunId = Annotated[str, matching(ID_PATTERN, _OF_RUN, Path)]
ExportName = Annotated[str, matching(r"^[a-z0-9-]{1,30}$", "a kind of export: onnx, …", Path)]
ExportFile = Annotated[
    str, matching(r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}$", "a file's name, such as model.onnx", Path)
]
OfJob = Annotated[str | None, matching(JOB_PATTERN, _OF_JOB, Query, description="only this job's")]
_MISSING: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorAnswer, "description": "no such run"}
}
# A report contains scripts. It may run them, but without our origin and so without the login.
_REPORT = {
    "Content-Security-Policy": "sandbox allow-scripts; default-src 'none'; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "font-src data:; frame-ancestors 'self'",
    "Content-Disposition": "inline; filename=report.html",
}


def add_run_routes(app: FastAPI, records: Records, client: Any) -> None:
    """Lists of runs, a run, its recorded rows, and history. `client` checks the right to read."""

    @app.get("/runs", response_model=RunPage)
    async def runs(
        client: client,
        limit: Annotated[
            int, Query(ge=1, le=MOST_ROWS, description="the most rows of an answer")
        ] = 100,
        after: Annotated[
            str | None, Query(max_length=100, description="`next` of the previous page")
        ] = None,
        job: OfJob = None,
        holder: Annotated[
            str | None, Query(max_length=500, description="the newest run of this holder")
        ] = None,
    ) -> Response:
        """Runs, newest first."""
        return _json(await records.runs(limit, after, job, holder))

    @app.get("/runs/{job}/{run_id}", response_model=RunDocument, responses=_MISSING)
    async def run(client: client, job: JobInPath, run_id: RunId) -> Response:
        """A run: its state, its plan, predictions and measurements, its events."""
        return _json(await records.run(job, run_id))

    @app.get("/runs/{job}/{run_id}/metrics", response_model=Recorded, responses=_MISSING)
    async def metrics(
        client: client,
        job: JobInPath,
        run_id: RunId,
        from_step: Annotated[
            int, Query(ge=0, le=10**12, description="the first step of the answer")
        ] = 0,
    ) -> Response:
        """Recorded rows, starting at a step. To follow a live run, ask again from `next_step`."""
        return _json(await records.metrics(job, run_id, from_step))

    @app.get("/runs/{job}/{run_id}/structure", response_model=Structure, responses=_MISSING)
    async def structure(client: client, job: JobInPath, run_id: RunId) -> Response:
        """The structure of the run's model."""
        return _json(await records.structure(job, run_id))

    @app.get("/runs/{job}/{run_id}/timeline", responses=_MISSING, response_class=Response)
    async def timeline(client: client, job: JobInPath, run_id: RunId) -> Response:
        """One step of the run's plan as predicted, rank by rank: a picture in SVG."""
        return Response(await records.timeline(job, run_id), media_type="image/svg+xml")

    @app.get("/runs/{job}/{run_id}/report", responses=_MISSING, response_class=Response)
    async def report(request: Request, client: client, job: JobInPath, run_id: RunId) -> Response:
        """The run's report, one self-contained page. A browser gets a page if there is none yet."""
        try:
            content = await records.report(job, run_id)
        except NotFound as error:
            if "text/html" not in request.headers.get("accept", ""):
                raise
            return missing_report(job, run_id, str(error))
        return Response(content, media_type="text/html; charset=utf-8", headers=_REPORT)

    @app.get("/runs/{job}/{run_id}/rejection", responses=_MISSING, response_class=Response)
    async def rejection(client: client, job: JobInPath, run_id: RunId) -> Response:
        """Why the run's data was rejected, one self-contained page."""
        content = await records.rejection(job, run_id)
        named = {"Content-Disposition": "inline; filename=rejection.html"}
        return Response(
            content, media_type="text/html; charset=utf-8", headers={**_REPORT, **named}
        )

    @app.get(
        "/runs/{job}/{run_id}/exports/{kind}/{file}",
        responses=_MISSING,
        response_class=Response,
    )
    async def exported(
        client: client, job: JobInPath, run_id: RunId, kind: ExportName, file: ExportFile
    ) -> Response:
        """A file of one of the run's exports."""
        content = await records.exported(job, run_id, kind, file)
        named = {"Content-Disposition": f'attachment; filename="{file}"'}
        return Response(
            content, media_type="application/octet-stream", headers={**_REPORT, **named}
        )

    @app.get("/history", response_model=History)
    async def history(client: client, job: OfJob = None) -> Response:
        """Each job's outcomes, and the finished runs, oldest first."""
        return _json(await records.history(job))


def add_tensorboard_routes(
    app: FastAPI, service: Any, login: Login, client: Any, known: Any
) -> None:
    """TensorBoard. Only users who may start runs can start it: it uses this machine's memory.

    The secret in its path gives access; with Airflow's login, `known` also checks the user.
    """

    @app.post(
        "/runs/{job}/{run_id}/tensorboard",
        dependencies=[Depends(check_origin)],
        responses=_MISSING,
        response_model=Opened,
    )
    async def start(client: client, job: JobInPath, run_id: RunId) -> Response:
        """Start the run's TensorBoard. Returns its path. Needs the right to start runs."""
        client.needs_run("starting TensorBoard")
        run = await asyncio.to_thread(service.records.found, job, run_id)
        secret = await service.tensorboards.open(run)
        return _json(json.dumps({"path": f"tensorboard/{secret}/"}).encode())

    async def ask(request: Request, secret: str, path: str = "") -> Response:
        await check_origin(request)
        query = request.url.query
        body = await service.receiver.body(request.stream(), request.headers.get("content-length"))
        answer = await service.tensorboards.ask(
            secret,
            quote(path) + (f"?{query}" if query else ""),
            request.method,
            request.headers.get("content-type"),
            body,
        )
        return Response(answer.content, answer.status, headers=answer.headers)

    async def guarded(request: Request, client: known, secret: str, path: str = "") -> Response:
        return await ask(request, secret, path)

    asked = ask if login == "token" else guarded
    app.add_api_route(
        "/tensorboard/{secret}/{path:path}", asked, methods=["GET", "POST"], include_in_schema=False
    )


def add_page_routes(app: FastAPI, login: Login, client: Any) -> None:
    """The page: public if it asks for the token itself, otherwise for users with read access."""

    async def page(request: Request, name: str = "") -> Response:
        return page_file(request, name, login)

    async def guarded(request: Request, client: client, name: str = "") -> Response:
        return page_file(request, name, login)

    shown = page if login == "token" else guarded

    async def start(request: Request) -> Response:
        return RedirectResponse("page/")

    async def guarded_start(request: Request, client: client) -> Response:
        return RedirectResponse("page/")

    app.add_api_route("/", start if login == "token" else guarded_start, include_in_schema=False)
    app.add_api_route("/page", shown, include_in_schema=False)
    app.add_api_route("/page/{name:path}", shown, include_in_schema=False)


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
