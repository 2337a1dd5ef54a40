"""The page of the operators, from their docstrings and signatures."""

from __future__ import annotations

import inspect
import re

from trainwright import operators
from trainwright.operators.base import StepOperator
from trainwright.tasks import chain

_HEAD = """# Operators

`from trainwright.operators import TrainOperator`, and so on. Each takes the arguments of every
Airflow task too (`task_id`, `retries`, …). [How to use them](../how-to/operators.md) has examples.
An input marked *(templated)* may be a Jinja template or another task's output.
"""


def operator_page() -> str:
    """Each operator: what it does, its inputs, what it returns, how it fails."""
    lines = [_HEAD, "## StepOperator", "", _text(StepOperator), ""]
    for name in operators.__all__:
        lines += [f"## {name}", "", _text(getattr(operators, name)), ""]
    lines += ["## TaskFlow decorators", "", "Each step has a decorator, whose function returns "]
    lines[-1] += "the operator's first input:"
    names = (f"`@task.trainwright_{step.name}`" for step in chain.steps())
    return "\n".join([*lines, "", ", ".join(names) + ".", ""])


def _text(one: type) -> str:
    """A class's docstring: a table needs an empty line before it."""
    text = inspect.cleandoc(one.__doc__ or "")
    return re.sub(r"(?m)^(?!\|)(.+)\n\|", r"\1\n\n|", text)
