"""Step `validate`: checks the data before a run allocates devices.

Read `step` first. `suite` infers the expectations, `kept_suite` keeps them by version; `check`
checks data in the process that `expectations` starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.tasks.lazy import exports

if TYPE_CHECKING:
    from trainwright.tasks.validate.check import validate

__all__ = ["validate"]

__getattr__ = exports(
    __name__,
    {
        "validate": "check",
    },
)
