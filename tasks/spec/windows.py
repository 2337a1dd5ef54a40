"""The daily window in which a host is available: `HH:MM-HH:MM`, UTC."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

_CLOCK = r"([01]\d|2[0-3]):[0-5]\d"
WINDOW = rf"^{_CLOCK}-{_CLOCK}$"


def seconds_left(window: str | None, now: datetime | None) -> float:
    """Seconds from `now` (with a time zone) to the window's end; 0 outside it, inf if no window."""
    if window is None or now is None:
        return math.inf
    begin, end = (int(clock[:2]) * 3600 + int(clock[3:]) * 60 for clock in window.split("-"))
    here = now.astimezone(UTC)
    since = (
        here.hour * 3600 + here.minute * 60 + here.second + here.microsecond / 1e6 - begin
    ) % 86400
    return max(0.0, (end - begin) % 86400 - since)


def next_change(window: str, now: datetime) -> datetime:
    """When the window ends, if it is open at `now`, or begins."""
    left_s = seconds_left(window, now)
    begin, end = window.split("-")
    return now + timedelta(seconds=left_s or seconds_left(f"{end}-{begin}", now))
