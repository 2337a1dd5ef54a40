"""The link between ranks of this machine: measured at first use, cached, renewed by `calibrate`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from trainwright.estimator.machine import machine_key
from trainwright.estimator.measure.all_reduce import measure_link, save
from trainwright.estimator.predict.communication import Link
from trainwright.infra.lock import locked
from trainwright.tasks import progress
from trainwright.tasks.errors import BadInput
from trainwright.tasks.settings import Settings

LINK_S = 1.5
"""plus the time in which two processes load torch and measure steps; below 9 s in total"""


def link_file(settings: Settings) -> Path:
    """The path of this machine's measured link."""
    return settings.home / "links" / f"cpu-{machine_key()}.json"


def link_for_this_machine(settings: Settings) -> Link:
    """The link between ranks of this machine, cached or measured now (less than 9 s).

    Raises TrainwrightError if it can't be measured.
    """
    path = link_file(settings)
    if (known := _kept_link(path)) is not None:
        return known
    with _link_lock(path):
        if (known := _kept_link(path)) is not None:  # another process measured it meanwhile
            return known
        progress.emit(
            "notice",
            message=f"measuring all-reduce on this machine once, for about {LINK_S + 5:.0f} s",
        )
        return _measured_link(path)


def renew_link(settings: Settings) -> Link:
    """Measure the link again, and cache it. Raises as `link_for_this_machine`."""
    path = link_file(settings)
    with _link_lock(path):
        return _measured_link(path)


def _measured_link(path: Path) -> Link:
    link = measure_link(budget_s=LINK_S)
    save(link, path)
    return link


def _kept_link(path: Path) -> Link | None:
    if not path.exists():
        return None
    try:
        return Link.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        progress.emit("notice", message=f"link: {path}: not a link, or truncated; measuring again")
        return None


@contextlib.contextmanager
def _link_lock(path: Path) -> Iterator[None]:
    """Let one process at a time measure the link, because two would disturb each other."""
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(path.with_name(f"{path.name}.lock"), wait=True))
        except OSError as error:
            raise BadInput(
                f"TRAINWRIGHT_HOME: {path}: can't be written ({error.strerror})"
            ) from None
        yield
