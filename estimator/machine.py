"""What tells this machine's processor from others, and how busy it may be while it is measured. Loads no torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from pathlib import Path

MOST_DRIFT = 3.0
"""How far a machine's speed may spread while it is calibrated: of a sentinel kernel's time, (p90 - p10) / median, the most.

Neighbours on a shared machine make 0.1 to 1.5, which is corrected for.
"""


def processor() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine_key() -> str:
    """What machines must share for figures measured on one to hold on the other: the processor and torch's version."""
    return hashlib.sha256(
        f"{processor()} torch {importlib.metadata.version('torch')}".encode()
    ).hexdigest()[:12]
