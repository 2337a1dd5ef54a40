"""The page's files, and security headers: only our scripts, only frames from our origin."""

from __future__ import annotations

import hashlib
import html
from collections.abc import Awaitable, Callable, MutableMapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fastapi import Request, Response
from fastapi.responses import RedirectResponse

from trainwright.tasks.service.records.run_records import NotFound

Login = Literal["token", "airflow"]
AsgiMessage = MutableMapping[str, Any]
_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_POLICY = {
    "text/html": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
}
_MISSING_REPORT = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>No report</title>
<link rel="stylesheet" href="../../../page/page.css">
<main><h1>No report</h1><p>{reason}.</p>
<p>A chain of steps makes it at its end. After a training alone, <code>trainwright analyze
{run_id}</code> makes it.</p>
<p><a href="../../../page/#/run/{job}/{run_id}">The page of the run</a></p></main></html>
"""
_NOTHING = "default-src 'none'; frame-ancestors 'none'"


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    """The files of the page, by path. No other file is served."""
    found = {}
    for path in sorted(_FOLDER.rglob("*")):
        if path.suffix in _TYPES:
            found[path.relative_to(_FOLDER).as_posix()] = path.read_bytes(), _TYPES[path.suffix]
    return found


def page_file(request: Request, name: str, login: Login) -> Response:
    """A file of the page. Raises NotFound."""
    if request.url.path.endswith("/page"):  # its files have relative addresses
        return RedirectResponse("page/")
    try:
        content, kind = _files()[name or "index.html"]
    except KeyError:
        raise NotFound("page: no such file") from None
    if kind.startswith("text/html"):  # the page reads how its user logs in
        content = content.replace(b'data-login=""', f'data-login="{login}"'.encode())
    mark = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {"ETag": mark, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == mark:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)


def missing_report(job: str, run_id: str, reason: str) -> Response:
    """What a browser shows that follows a link to a report that there isn't. Its links are relative
    to the report's address."""
    page = _MISSING_REPORT.format(job=job, run_id=run_id, reason=html.escape(reason))
    return Response(page, status_code=404, media_type=_TYPES[".html"])


class Guarded:
    """Adds security headers to every answer, which limit scripts, frames and caching."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(
        self,
        scope: AsgiMessage,
        receive: Callable[[], Awaitable[AsgiMessage]],
        send: Callable[[AsgiMessage], Awaitable[None]],
    ) -> None:
        """Pass a request on."""

        async def guarded(message: AsgiMessage) -> None:
            if (
                message["type"] == "http.response.start" and message["status"] != 304
            ):  # that has the kept answer's headers
                headers = {name.lower(): value for name, value in message["headers"]}
                kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0]
                added = {
                    b"x-content-type-options": b"nosniff",
                    b"referrer-policy": b"no-referrer",
                    b"cache-control": b"no-store",
                    b"content-security-policy": _POLICY.get(kind, _NOTHING).encode(),
                }
                message["headers"] = [
                    *message["headers"],
                    *((name, value) for name, value in added.items() if name not in headers),
                ]
            await send(message)

        await self._app(scope, receive, guarded if scope["type"] == "http" else send)
