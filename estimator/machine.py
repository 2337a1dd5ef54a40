"""Identifies this machine's processor, and bounds how busy the machine may be while it is measured.

Loads no torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from pathlib import Path

MOST_DRIFT = 3.0
"""The largest allowed spread of the machine's speed while it is calibrated.

It is (p90 − p10) / median of a sentinel kernel's time. Neighbours on a shared machine cause 0.1 to
1.5, which the fit corrects for.
"""


def processor() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def busy(drift: float) -> str:
    """The words for a machine whose speed spread by this much while it was calibrated."""
    varied = f"by {100 * drift:.0f} %" if drift < 10 else f"by a factor of {1 + drift:,.0f}"
    return f"this machine was busy when it was calibrated: its speed varied {varied}"


def machine_key() -> str:
    """A key of the processor and torch's version. Machines with equal keys share measurements."""
    return hashlib.sha256(
        f"{processor()} torch {importlib.metadata.version('torch')}".encode()
    ).hexdigest()[:12]
