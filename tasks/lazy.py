"""Exports of a package that are imported on first use (PEP 562).

Importing a step's function loads heavy libraries, which a DAG file that only names the package must
not do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def exports(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """A package's `__getattr__`. `modules` maps each exported name to its module."""

    def find(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return find
