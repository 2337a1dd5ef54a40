"""The processes of a sandbox: the first sets it up, the worker runs the function."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from trainwright.infra.process import allow_inspection
from trainwright.infra.sandbox import Protection, SandboxLimits, kernel
from trainwright.infra.sandbox.confine import enter_root
from trainwright.infra.sandbox.fallback import restrict
from trainwright.infra.sandbox.memory_group import MemoryGroup
from trainwright.infra.sandbox.refused_calls import refuse_uncounted_memory


@dataclass(frozen=True)
class SandboxConfig:
    """The configuration of a sandbox."""

    limits: SandboxLimits
    protection: Protection
    readable: Sequence[str]
    folder: str | None
    """its temporary folder, the only writable one; None without protection"""
    group: MemoryGroup | None = None
    """counts all its memory; without one, calls that make memory of no process are refused"""


def run_first_process(
    work: Callable[[], bytes], config: SandboxConfig, answer: int, output: int, status: int
) -> NoReturn:
    """Set up, start the worker, and write its exit code, or `!` and an error, to `status`.

    In namespaces, every other process ends with this one, and none can send it a signal.
    """
    try:
        kernel.end_with_parent(signal.SIGKILL)
        if config.protection != "none":
            # If memory runs out, the kernel kills this process first.
            Path("/proc/self/oom_score_adj").write_text("1000")
        if config.group is not None:
            config.group.join()
        if config.protection == "own namespaces":
            enter_root(config.readable, config.limits.disk_bytes)
        allow_inspection(False)  # or the worker could take its open files
        worker = os.fork()
        if worker == 0:
            _run_worker(work, config, answer, output, status)
        os.close(answer)
        os.close(output)
        ended = 0
        while ended != worker:
            ended, code = os.wait()
        os.write(status, str(os.waitstatus_to_exitcode(code)).encode())
    except OSError as error:
        os.write(status, f"!{error}".encode())
    finally:
        os._exit(0)


def _run_worker(
    work: Callable[[], bytes], config: SandboxConfig, answer: int, output: int, status: int
) -> NoReturn:
    code = 1
    try:
        try:
            _prepare_worker(config, answer, output, status)
        except (OSError, ValueError, OverflowError) as error:
            os.write(status, f"!{error}".encode())
            raise
        os.close(status)
        left = memoryview(work())
        while left:
            left = left[os.write(answer, left) :]
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - printed; the supervisor keeps the end of the output
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(code & 0xFF)


def _prepare_worker(config: SandboxConfig, answer: int, output: int, status: int) -> None:
    allow_inspection(True)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in (answer, status):
            try:
                os.close(int(name))
            except OSError:  # the descriptor that listed the folder
                continue
    if config.folder is not None:
        os.chdir(config.folder)
        os.environ.update(HOME=config.folder, TMPDIR=config.folder)
        tempfile.tempdir = None
    limits = config.limits
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, int(limits.timeout_s) + 1)
    _limit(resource.RLIMIT_FSIZE, limits.disk_bytes)
    _limit(resource.RLIMIT_AS, limits.memory_bytes)
    if config.protection.endswith("audit hook"):
        assert config.folder is not None
        restrict(config.readable, config.folder)
    if config.protection != "none" and config.group is None:
        kernel.no_new_privileges()
        refuse_uncounted_memory()


def _limit(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))
