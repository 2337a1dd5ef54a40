"""Exports of a package that are imported when they are first used (PEP 562).

A step's function loads what the step needs, which a DAG file that only names the package must not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def exports(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """A package's `__getattr__`: `modules` says for each exported name which of its modules has it."""

    def find(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return find
