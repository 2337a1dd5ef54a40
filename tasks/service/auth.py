"""The caller of the service and what they may do.

The role `read` gets answers from structures; `run` may also run a model's code and read data.
`trainwright serve` identifies callers by bearer tokens, the service in Airflow by Airflow's login.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from trainwright.tasks.errors import BadInput, Forbidden, Unauthorized

Role = Literal["read", "run"]
_LEAST_LENGTH = 16
_scheme = HTTPBearer(auto_error=False)


@dataclass(frozen=True)
class Caller:
    """The sender of a request."""

    role: Role

    def needs_run(self, what: str) -> None:
        """Raises Forbidden if the caller may not start runs."""
        if self.role != "run":
            raise Forbidden(f"{what} needs the right to start runs")


class BearerTokens:
    """A dependency that identifies callers by their tokens, compared in constant time."""

    def __init__(self, tokens: Mapping[Role, str]) -> None:
        self._digests = [(role, _digest(token)) for role, token in tokens.items()]

    async def __call__(
        self, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_scheme)] = None
    ) -> Caller:
        """The caller. Raises Unauthorized."""
        given = _digest(credentials.credentials if credentials else "")
        found: Role | None = None
        for role, digest in self._digests:  # compares all, for constant time
            if hmac.compare_digest(given, digest):
                found = role
        if credentials is None or found is None:
            raise Unauthorized("missing or wrong bearer token; send Authorization: Bearer …")
        return Caller(found)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


async def check_origin(request: Request) -> None:
    """Raises Forbidden if a page of another origin makes a browser send this request."""
    # A coroutine although it awaits nothing: FastAPI runs plain functions in threads.
    origin = request.headers.get("origin")
    if origin is None:
        return
    host = request.headers.get("host", "")
    if not host or urlsplit(origin).netloc.lower() != host.lower():  # the scheme may be a proxy's
        raise Forbidden(f"origin: got {origin[:200]}; allowed: pages of {host[:200]}")


def token_from(path: Path) -> str:
    """The token in a file. Creates a missing file, readable only by its owner. Raises BadInput."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise BadInput(
                    f"--token-file: {path} is readable by other users; allowed: mode 600"
                ) from None
            token = path.read_text().strip()
        else:
            token = secrets.token_urlsafe(32)
            with os.fdopen(descriptor, "w") as file:
                file.write(token + "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"--token-file: {path}: {getattr(error, 'strerror', None) or 'is not text'}"
        ) from None
    return checked(token, f"--token-file: {path}")


def checked(token: str, name: str) -> str:
    """The token. If it is malformed, raises BadInput without showing it."""
    if len(token) < _LEAST_LENGTH or not token.isascii() or any(one.isspace() for one in token):
        raise BadInput(
            f"{name}: not a token; allowed: at least {_LEAST_LENGTH} characters of ASCII, no spaces"
        )
    return token
