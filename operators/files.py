"""The files of runs in a browser, behind Airflow's login: what `operators.links` lead to.

Only runs of the configured store; names are checked by the store's own rule. A report holds scripts, so it is shown in a sandbox
of an origin of its own: it can't act in Airflow's name.
"""

from html import escape
from typing import Annotated, Any

from fastapi import Depends, FastAPI
from starlette.responses import HTMLResponse, JSONResponse, Response

from trainwright.operators.hooks import configure, connection_ids, values_of
from trainwright.operators.service import airflow_client
from trainwright.tasks.errors import BadInput, ServiceUnreachable, TrainwrightError
from trainwright.tasks.run import Run
from trainwright.tasks.service.auth import Client
from trainwright.tasks.settings import overridden, settings

_SHOWN = {".json": "application/json", ".html": "text/html", ".log": "text/plain", ".py": "text/plain"}
_HEADERS = {
    "Content-Security-Policy": "sandbox allow-scripts; default-src 'none'; img-src data:; style-src 'unsafe-inline' data:; "
    "font-src data:; script-src 'unsafe-inline' 'unsafe-eval'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
}  # fmt: skip


def create_files_app() -> FastAPI:
    """The application to mount."""
    configure()
    values = values_of(connection_ids(None, None))
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/{job}/{run_id}/{path:path}")
    def show(job: str, run_id: str, path: str, _: Annotated[Client, Depends(airflow_client)]) -> Response:
        try:
            with overridden(values):
                run = Run(f"{settings().store.rstrip('/')}/runs/{job}/{run_id}")
                return _folder(run, path) if path == "" or path.endswith("/") else _file(run, path)
        except (FileNotFoundError, BadInput):
            return HTMLResponse("<p>There is no such file yet.</p>", 404, _HEADERS)

    @app.exception_handler(TrainwrightError)
    def told(_: Any, error: TrainwrightError) -> Response:
        status = {"unauthorized": 401, "forbidden": 403}.get(
            error.kind, 503 if isinstance(error, ServiceUnreachable) else 500
        )
        return JSONResponse({"error": error.document()}, status, _HEADERS)

    return app


def _file(run: Run, path: str) -> Response:
    kind = _SHOWN.get(path[path.rfind(".") :], "application/octet-stream")
    return Response(run.objects.get(path), 200, _HEADERS, media_type=kind)


def _folder(run: Run, path: str) -> Response:
    found = [item for item in run.objects.list(path) if item.key.startswith(path)]
    if not found:
        raise FileNotFoundError(f"{run.uri}/{path}")
    rows = "".join(
        f'<tr><td><a href="{escape(item.key.removeprefix(path))}">{escape(item.key)}</a><td align="right">{item.size:,} B'
        for item in found
    )
    page = f"<!doctype html><title>{escape(run.id)}</title><h1>{escape(run.job_name)} {escape(run.id)}</h1><table>{rows}</table>"
    return HTMLResponse(page, 200, _HEADERS)
