"""Checks a request's limits while reading and parsing it: size, depth, numbers."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.documents import kind_of

MAX_BYTES = 4 * 2**20
MAX_DEPTH = 32
MAX_NUMBER = 1e30  # products of a few of them stay finite
BODY_TIMEOUT_S = 30.0
MAX_BUFFERED_BYTES = 64 * 2**20
"""total size of all bodies being received"""
_DRAINED_BYTES = 64 * 2**20
"""bytes of an oversized body that are read and discarded, so that the sender reads the answer"""

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_AS_PARENTHESES = bytes.maketrans(b"[{]}", b"(())")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class TooLarge(BadInput):
    """The body is larger than allowed."""

    kind = "too_large"


class TooBusy(BadInput):
    """Too much work is waiting; try again."""

    kind = "busy"


class TooSlow(BadInput):
    """The body did not arrive in time."""

    kind = "timeout"


class Receiver:
    """Reads bodies within a limit on their total size."""

    def __init__(self) -> None:
        self._buffered = 0

    async def body(self, stream: AsyncIterator[bytes], declared: str | None) -> bytes:
        """A whole body. Raises TooLarge, TooBusy, TooSlow."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                too_large = (
                    declared is not None and declared.isdigit() and int(declared[:20]) > MAX_BYTES
                )
                async for part in stream:
                    size += len(part)
                    too_large = too_large or size > MAX_BYTES
                    if too_large:
                        if size > _DRAINED_BYTES:
                            break
                        continue
                    if self._buffered + len(part) > MAX_BUFFERED_BYTES:
                        raise TooBusy("too many large requests at once; try again in a second")
                    self._buffered += len(part)
                    parts.append(part)
        except TimeoutError:
            raise TooSlow(f"request: the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
        finally:
            self._buffered -= sum(map(len, parts))
        if too_large:
            raise TooLarge(f"request: the body is larger than the {MAX_BYTES} bytes allowed")
        return b"".join(parts)


def too_deep(body: bytes) -> bool:
    """Whether brackets nest too deep, or do not match."""
    brackets = _STRING.sub(b"", body).translate(_AS_PARENTHESES, _NO_BRACKETS)
    for _ in range(MAX_DEPTH):  # each round removes the innermost level
        if not brackets:
            return False
        brackets = brackets.replace(b"()", b"")
    return bool(brackets)


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises BadInput if it is another value, too deep or not finite."""
    if too_deep(body):
        raise BadInput(
            f"request: nested deeper than {MAX_DEPTH} levels, or its brackets do not match"
        )
    try:
        value = json.loads(
            body,
            parse_float=_number,
            parse_int=_number,
            parse_constant=_not_finite,
            object_pairs_hook=_once,
        )
    except UnicodeDecodeError:
        raise BadInput("request: the body is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise BadInput(f"request: not valid JSON (line {error.lineno}): {error.msg}") from None
    if not isinstance(value, dict):
        raise BadInput(f"request: got {kind_of(value)}; allowed: a mapping of fields")
    try:
        body.decode().encode()
        # An escape of half a surrogate pair is not valid text.
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError:
        raise BadInput("request: the body contains text that is not Unicode") from None
    return value


def _number(text: str) -> int | float:
    whole = text.lstrip("-").isdigit()
    value: int | float = int(text) if whole and len(text) <= 32 else float(text)
    if not math.isfinite(value) or abs(value) > MAX_NUMBER:
        raise BadInput(f"request: got the number {text[:40]}; allowed: up to {MAX_NUMBER:g}")
    return value


def _not_finite(text: str) -> NoReturn:
    raise BadInput(f"request: got {text}; allowed: finite numbers")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadInput(f"request: the field {twice[:80]!r} is given twice")
    return found
