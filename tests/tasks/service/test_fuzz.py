"""The service against its OpenAPI document: no request gets a 5xx or an undocumented answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from serving import RUN, serving

# Without positive_data_acceptance: JSON Schema can't express that a job's fields agree, or that a
# source exists, so schemathesis would report a 422 for these as a refusal of valid data.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "missing_required_header",
)


def fuzz(
    address: str, folder: Path, examples: int, phases: str
) -> subprocess.CompletedProcess[str]:
    """Run schemathesis over every route; it writes its files to the folder."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        f"{address}/openapi.json",
        "--url",
        address,
        "-H",
        f"Authorization: Bearer {RUN}",
        "--max-examples",
        str(examples),
        "--seed",
        "1",
        "--phases",
        phases,
        "--request-timeout",
        "60",
        "--checks",
        ",".join(CHECKS),
        "--no-color",
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=folder)


@pytest.mark.slow
def test_no_request_gets_a_server_error_or_an_answer_outside_the_schema(tmp_path: Path) -> None:
    with serving(tmp_path / "home", "--workers", "2", "--timeout", "20") as address:
        done = fuzz(address, tmp_path, 10, "examples,coverage,fuzzing,stateful")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
