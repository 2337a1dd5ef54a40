"""What Airflow shows of trainwright in `airflow providers list`."""

from __future__ import annotations

from typing import Any


def get_provider_info() -> dict[str, Any]:
    """The provider's metadata (entry point `apache_airflow_provider`)."""
    return {
        "package-name": "trainwright",
        "name": "trainwright",
        "description": "Size, train, store and analyse models on mixed CPUs and GPUs.",
    }
