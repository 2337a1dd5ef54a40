"""Builds Horovod for the installed torch, and installs it: `python -m trainwright.infra.horovod`.

Horovod 0.28.1 compiles as C++14, but torch's headers need C++20, so it can't be an ordinary
dependency. Here a compiler wrapper rewrites the flag. The wheel is kept in
`~/.cache/trainwright/wheels`, by versions of Horovod, torch and Python: each user compiles it once.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import unquote

VERSION = "0.28.1"
_CUDA_TOOLS = "/usr/local/cuda/bin"  # where NVIDIA's installer puts them, without changing PATH
_COMPILER_WRAPPER = """#!/bin/bash
args=()
for arg in "$@"; do case "$arg" in -std=*14) args+=(-std=gnu++20) ;; *) args+=("$arg") ;; esac; done
exec g++ "${args[@]}"
"""


def wheel_cache() -> Path:
    """The folder of wheels for this Python, torch and machine. Raises OSError without torch."""
    root = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainwright" / "wheels"
    )
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise OSError(
            "Horovod is built for the installed torch, and there is none; install torch first"
        ) from None
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return root / f"horovod-{VERSION}-torch-{torch}-{python}-{platform.machine()}"


def installed() -> bool:
    """Whether Horovod is installed, can be imported, and was not built for another torch."""
    try:
        found = importlib.metadata.distribution("horovod")
    except importlib.metadata.PackageNotFoundError:
        return False
    if found.version != VERSION:
        return False
    # pip records the wheel that it installed. A wheel for another torch may still import, but
    # torch keeps no binary interface from version to version.
    source = json.loads(found.read_text("direct_url.json") or "{}").get("url", "")
    cache = Path(unquote(source)).parent.name
    if cache.startswith(f"horovod-{VERSION}-torch-") and cache != wheel_cache().name:
        return False
    import_check = [sys.executable, "-c", "import horovod.torch as hvd; hvd.init()"]
    return subprocess.run(import_check, capture_output=True, check=False).returncode == 0


def write_compiler(folder: Path) -> Path:
    """Write a compiler that takes every C++14 flag as C++20. Returns its path."""
    wrapper = folder / "g++-gnu20"
    wrapper.write_text(_COMPILER_WRAPPER)
    wrapper.chmod(0o755)
    return wrapper


def build(into: Path) -> Path:
    """Compile the wheel into a folder. Takes minutes; prints a line every ten seconds.

    Returns its path. Raises OSError if a tool is missing or the compiler fails; the message names
    the log.
    """
    missing = [tool for tool in ("g++", "cmake", "make") if shutil.which(tool) is None]
    if missing:
        raise OSError(
            f"Horovod's build needs {', '.join(missing)}: install them with the system's package "
            "manager"
        )
    into.mkdir(parents=True, exist_ok=True)
    log_path = into / "build.log"
    with tempfile.TemporaryDirectory(prefix="trainwright-horovod-") as folder:
        environment = os.environ | {
            "CXX": str(write_compiler(Path(folder))),
            # CMake looks for CUDA's headers beside the first nvcc, which may be a wrapper script.
            "PATH": os.pathsep.join([_CUDA_TOOLS, os.environ["PATH"]]),
            "MAKEFLAGS": f"-j{os.cpu_count() or 1}",
            "HOROVOD_WITH_PYTORCH": "1",
            "HOROVOD_WITHOUT_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITHOUT_MPI": "1",
        }
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-build-isolation",
            "--no-deps",
            "--no-cache-dir",
            "-v",
        ]
        command += [f"horovod=={VERSION}", "-w", folder]
        started = time.monotonic()
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            while process.poll() is None:
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    took_s = time.monotonic() - started
                    _say(f"building Horovod {VERSION} (5 to 10 minutes, once): {took_s:4.0f} s")
        if process.returncode != 0:
            raise OSError(f"Horovod did not build (pip exit {process.returncode}); see {log_path}")
        built = next(Path(folder).glob("horovod-*.whl"))
        part = into / f"{built.name}.{os.getpid()}.part"
        shutil.copyfile(built, part)
        return part.rename(into / built.name)


def wheel() -> Path:
    """The wheel for this Python, torch and machine, cached or built now. Raises OSError."""
    cache = wheel_cache()
    wheels = sorted(cache.glob("horovod-*.whl"))
    return wheels[-1] if wheels else build(cache)


def main(arguments: list[str]) -> int:
    """Install Horovod if it is missing. With `--wheel`, only cache its wheel."""
    if installed():
        return 0
    try:
        path = wheel()
    except OSError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    if "--wheel" in arguments:
        return 0
    _say(f"installing {path.name} from {path.parent}")
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--force-reinstall",
        "--no-deps",
        str(path),
    ]
    return subprocess.run(install, check=False).returncode


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
