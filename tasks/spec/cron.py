"""A schedule of five cron fields that selects at least one time."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_MONTHS, _DAYS = "jan feb mar apr may jun jul aug sep oct nov dec", "sun mon tue wed thu fri sat"
_CRON_RANGES = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_CRON_NAMES = {
    name: number
    for names, first in ((_MONTHS, 1), (_DAYS, 0))
    for number, name in enumerate(names.split(), first)
}
_LONGEST_MONTHS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def _cron_pattern() -> re.Pattern[str]:
    def field(value: str) -> str:
        part = rf"(\*|{value}(-{value})?)(/[1-9][0-9]?)?"
        return rf"{part}(,{part})*"

    months, days = _MONTHS.replace(" ", "|"), _DAYS.replace(" ", "|")
    minute, hour, day = "[0-5]?[0-9]", "([01]?[0-9]|2[0-3])", "(0?[1-9]|[12][0-9]|3[01])"
    return re.compile(
        " +".join(map(field, (minute, hour, day, f"(0?[1-9]|1[0-2]|{months})", f"([0-7]|{days})")))
    )


_CRON = _cron_pattern()


def _cron_values(field: str, low: int, high: int) -> set[int]:
    """The values that a cron field selects. Raises ValueError."""
    found: set[int] = set()
    for part in field.split(","):
        given, _, step = part.partition("/")
        ends = (
            [_CRON_NAMES[one] if one in _CRON_NAMES else int(one) for one in given.split("-")]
            if given != "*"
            else [low, high]
        )
        last = ends[-1] if len(ends) > 1 or not step else high
        if high == 7 and last == 0 < ends[0]:  # Sunday is 0 and 7
            last = 7
        if last < ends[0]:
            raise ValueError(f"a range that begins with its lower end, not {given}")
        if int(step or 1) > high:
            raise ValueError(f"a step of at most {high} in this field, not {part}")
        found |= set(range(ends[0], last + 1, int(step or 1)))
    return found


def _cron(value: str) -> str:
    given = value.strip().lower()
    if not _CRON.fullmatch(given):
        raise ValueError(
            'the five cron fields minute, hour, day, month, weekday, such as "0 3 * * *"'
        )
    fields = given.split()
    found = [_cron_values(one, *ends) for one, ends in zip(fields, _CRON_RANGES, strict=True)]
    days, months = found[2], found[3]
    # With a weekday, cron also runs on that weekday.
    if fields[4] == "*" and min(days) > max(_LONGEST_MONTHS[month - 1] for month in months):
        raise ValueError(f"a day that the month has, not day {fields[2]} of month {fields[3]}")
    return value


Cron = Annotated[str, AfterValidator(_cron)]
