"""Finds the CPUs and GPUs (by NVML) of this machine, or of other hosts by ssh, for a pool file.

On another host it runs a script that needs only Python's standard library; nothing is installed
there. `tasks.ssh` builds the ssh command.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from typing import Any

from trainwright.estimator.devices import other_board, recognise
from trainwright.tasks import progress
from trainwright.tasks.errors import BadInput
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.host_spec import DeviceEntry, Host
from trainwright.tasks.spec.pool import Pool
from trainwright.tasks.ssh import ADDRESS, ssh_command, unreachable, why_ended

TIMEOUT_S = 30.0
SCRIPT = """
import ctypes, json, os
gpus = []
try:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    if nvml.nvmlInit_v2() == 0:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
            memory = (ctypes.c_ulonglong * 3)()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                nvml.nvmlDeviceGetName(handle, name, 96)
                nvml.nvmlDeviceGetMemoryInfo(handle, memory)
                gpus.append({"name": name.value.decode(), "memory_bytes": memory[0]})
        nvml.nvmlShutdown()
except OSError:
    pass
cores, name = len(os.sched_getaffinity(0)), os.uname().nodename
memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
print(json.dumps({"cores": cores, "gpus": gpus, "name": name, "memory_bytes": memory}))
"""


def probe(addresses: list[str], settings: Settings) -> Pool:
    """The pool of these hosts; without addresses, of this machine.

    Raises BadInput, or ServiceUnreachable with the host's name.
    """
    twice = next((one for one, count in Counter(addresses).items() if count > 1), None)
    if twice is not None:
        raise BadInput(f"--host: got {twice!r} twice; allowed: each host once")
    hosts: list[Host] = []
    for address in addresses or ["localhost"]:
        found = _ask(address, settings)
        name = "localhost" if not addresses else _name(found["name"], {host.name for host in hosts})
        # The memory of this machine is measured when a plan is made.
        size = f"{found['memory_bytes'] >> 20}MiB" if address != "localhost" else None
        hosts.append(
            Host(
                name=name,
                address=address,
                devices=_entries(found, address),
                memory=size,  # type: ignore[arg-type]
            )
        )
    return Pool(name="probed", hosts=hosts)


def _ask(address: str, settings: Settings) -> dict[str, Any]:
    if not ADDRESS.fullmatch(address):
        raise BadInput(f"--host: got {address!r}; allowed: a host's name or address")
    command = (
        [sys.executable, "-"]
        if address == "localhost"
        else [*ssh_command(address, settings), "python3", "-"]
    )
    try:
        done = subprocess.run(
            command,
            input=SCRIPT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            encoding="utf-8",
        )
    except FileNotFoundError:
        raise BadInput("--host: needs ssh, which is not installed on this machine") from None
    except subprocess.TimeoutExpired:
        raise unreachable(address, f"no answer within {TIMEOUT_S:g} s", settings) from None
    if done.returncode != 0:
        raise unreachable(address, why_ended(done.stderr, done.returncode), settings)
    try:
        document = json.loads(done.stdout.strip().splitlines()[-1])
        return {
            "cores": int(document["cores"]),
            "gpus": list(document["gpus"]),
            "name": str(document["name"]),
            "memory_bytes": int(document["memory_bytes"]),
        }
    except (ValueError, IndexError, KeyError, TypeError):
        raise unreachable(address, f"answered {done.stdout[:80]!r}", settings) from None


def _name(node: str, used: set[str]) -> str:
    plain = re.sub(r"[^a-z0-9-]+", "-", node.lower()).strip("-")[:50].strip("-") or "host"
    return next(
        one for one in (plain, *(f"{plain}-{n}" for n in range(2, 10_000))) if one not in used
    )


def _entries(found: dict[str, Any], address: str) -> list[DeviceEntry]:
    entries = [DeviceEntry(type="cpu", cores=float(found["cores"]))]
    kinds: Counter[str] = Counter()
    for gpu in found["gpus"]:
        kind = recognise(gpu["name"], gpu["memory_bytes"])
        if kind is None:
            progress.emit(
                "notice",
                message=f"host {address}: {gpu['name']} is not a known device type; left out",
            )
        else:
            kinds[kind] += 1
            if other_board(gpu["name"], kind):
                progress.emit(
                    "notice",
                    message=f"host {address}: {gpu['name']} counts as {kind}, whose datasheet "
                    "describes a faster SXM board; run `trainwright calibrate --probes` on that "
                    "host to correct its times",
                )
    return entries + [DeviceEntry(type=kind, count=count) for kind, count in kinds.items()]
