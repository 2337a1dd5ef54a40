"""Which devices a machine has: its CPUs, and its GPUs by NVML; here, or on other hosts by ssh. Makes a pool file of them.

On the other host a script of Python's standard library runs; nothing is installed there. ssh asks nothing (BatchMode) and
connects only to hosts whose keys it knows.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from typing import Any

from trainwright.estimator.devices import recognise
from trainwright.tasks import progress
from trainwright.tasks.errors import BadInput, ServiceUnreachable
from trainwright.tasks.pool import DeviceEntry, Host, Pool

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
            handle, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), (ctypes.c_ulonglong * 3)()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                nvml.nvmlDeviceGetName(handle, name, 96)
                nvml.nvmlDeviceGetMemoryInfo(handle, memory)
                gpus.append({"name": name.value.decode(), "memory_bytes": memory[0]})
        nvml.nvmlShutdown()
except OSError:
    pass
print(json.dumps({"cores": len(os.sched_getaffinity(0)), "gpus": gpus, "name": os.uname().nodename}))
"""


def probe(addresses: list[str]) -> Pool:
    """The pool of this machine (without addresses), or of these hosts. Raises BadInput, ServiceUnreachable naming the host."""
    hosts: list[Host] = []
    for address in addresses or ["localhost"]:
        found = _ask(address)
        name = "localhost" if not addresses else _name(found["name"], {host.name for host in hosts})
        hosts.append(Host(name=name, address=address, devices=_entries(found, address)))
    return Pool(name="probed", hosts=hosts)


def _ask(address: str) -> dict[str, Any]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.:_-]{0,252}", address):  # ssh would read a leading - as an option
        raise BadInput(f"--host: got {address!r}; allowed: a host's name or address")
    here = address == "localhost"
    ssh = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=10", "--"]
    command = [sys.executable, "-"] if here else [*ssh, address, "python3", "-"]
    try:
        done = subprocess.run(
            command, input=SCRIPT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, encoding="utf-8"
        )
    except FileNotFoundError:
        raise BadInput("--host: needs ssh, which is not installed here") from None
    except subprocess.TimeoutExpired:
        raise _unreachable(address, f"no answer in {TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        raise _unreachable(address, _why(done.stderr) or f"ended with {done.returncode}")
    try:
        document = json.loads(done.stdout.strip().splitlines()[-1])
        return {"cores": int(document["cores"]), "gpus": list(document["gpus"]), "name": str(document["name"])}
    except (ValueError, IndexError, KeyError, TypeError):
        raise _unreachable(address, f"answered {done.stdout[:80]!r}") from None


def _why(said: str) -> str:
    """The reason in what ssh said, one line; of a host's key, which of the two cases it is."""
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in said:
        shown = re.search(r"SHA256:[A-Za-z0-9+/]+", said)
        return f"its host key is not the one in known_hosts{f' (it shows {shown[0]})' if shown else ''}: perhaps another machine"
    if re.search(r"No \S+ host key is known for", said):
        return "its host key is not in known_hosts: compare it with the host's own, then add it (ssh-keyscan shows it)"
    return (said.strip().splitlines() or [""])[-1].strip()


def _unreachable(address: str, why: str) -> ServiceUnreachable:
    return ServiceUnreachable(
        f"host {address}: {why}; `ssh -o BatchMode=yes {address} python3 -V` must work, and its key be in known_hosts",
        service="ssh", address=address,
    )  # fmt: skip


def _name(node: str, used: set[str]) -> str:
    plain = re.sub(r"[^a-z0-9-]+", "-", node.lower()).strip("-")[:50].strip("-") or "host"
    return next(one for one in (plain, *(f"{plain}-{n}" for n in range(2, 10_000))) if one not in used)


def _entries(found: dict[str, Any], address: str) -> list[DeviceEntry]:
    entries = [DeviceEntry(type="cpu", cores=float(found["cores"]))]
    kinds: Counter[str] = Counter()
    for gpu in found["gpus"]:
        kind = recognise(gpu["name"], gpu["memory_bytes"])
        if kind is None:
            progress.emit("notice", message=f"host {address}: {gpu['name']} is no device type known here; left out")
        else:
            kinds[kind] += 1
    return entries + [DeviceEntry(type=kind, count=count) for kind, count in kinds.items()]
