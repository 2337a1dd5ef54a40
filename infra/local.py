"""The embedded stack."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class S3Access:
    """How to reach the embedded S3 server."""

    endpoint: str
    access_key: str
    secret_key: str = field(repr=False)


def s3_access(home: Path) -> S3Access:
    """The embedded server's address and keys. Raises FileNotFoundError where it was never set up."""
    return S3Access(**json.loads((home / "s3" / "access.json").read_text()))
