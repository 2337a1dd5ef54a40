"""Errors of a model's code in its first pass, which are bad input."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.train.exchange.collective import PeersLost
from trainwright.tasks.train.out_of_memory import is_out_of_memory


class FirstPass:
    """Whether the model has completed a pass: an error before that is raised as BadInput."""

    _proven = False

    @contextlib.contextmanager
    def named_errors(self, what: Callable[[], str]) -> Iterator[None]:
        """Raise BadInput for an error of the model's code, until passes have ended once."""
        try:
            yield
        except TrainwrightError:
            raise
        except Exception as error:
            if self._proven or is_out_of_memory(error) or isinstance(error.__cause__, PeersLost):
                raise
            raise BadInput(f"model: {what()} raised {type(error).__name__}: {error}") from error
        self._proven = True


def shapes(value: Any) -> str:
    """Shapes and types of tensors, for messages."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {shapes(one)}" for name, one in value.items())
    return f"{tuple(value.shape)} {value.dtype}".replace("torch.", "")
