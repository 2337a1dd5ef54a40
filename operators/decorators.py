"""TaskFlow decorators: a function makes the job, or names the data, and the operator does the work.

    @task.trainwright_train(device_pool="lab.yaml")
    def train(table: str, width: int) -> dict:
        return {"name": "mine", "data": {"uri": table}, "model": {"source": "/models/m.py", "config": {"width": width}}}

    train.partial(table=make_table()).expand(width=[32, 64])

The function runs on the worker, with upstream results and the context as any TaskFlow function has them; what the decorator is
given are the operator's inputs. What the function returns is taken as it is: no template in it is rendered. A task that is tried
again calls the function again; where it returns the same job, training goes on where it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from airflow.sdk import Context
from airflow.sdk.bases.decorator import (
    DecoratedOperator,
    TaskDecorator,
    determine_kwargs,
    task_decorator_factory,
)
from airflow.sdk.definitions.context import context_merge

from trainwright.operators.base import airflow_errors
from trainwright.operators.train import TrainOperator
from trainwright.operators.validate import ValidateOperator
from trainwright.tasks.errors import BadInput


class FromFunction(DecoratedOperator):
    """An operator, one of whose inputs a function returns when the task runs."""

    input_name: ClassVar[str]
    paths: ClassVar[bool] = False
    """whether a file's path may stand for the mapping"""

    def execute(self, context: Context) -> Any:
        """Call the function, then do the step."""
        context_merge(context, self.op_kwargs)
        kwargs = determine_kwargs(self.python_callable, self.op_args, context)
        returned = self.python_callable(*self.op_args, **kwargs)
        with airflow_errors():
            setattr(self, self.input_name, self._checked(returned))
        # The UI shows what was returned; not after a deferral, where a later instance that calls nothing would erase it.
        self.overwrite_rtif_after_execution = True
        return super().execute(context)

    def _checked(self, returned: object) -> dict[str, Any] | str:
        if isinstance(returned, Mapping):
            return dict(returned)
        if self.paths and isinstance(returned, str | os.PathLike) and str(returned).strip():
            return os.fspath(returned)
        allowed = "a mapping, as in a job file" + (", or a job file's path" if self.paths else "")
        raise BadInput(
            f"{self.task_id}: the function returned {returned!r:.80} for `{self.input_name}`; allowed: {allowed}"
        )


class TrainFromFunction(FromFunction, TrainOperator):
    """`TrainOperator` on the job that a function returns."""

    template_fields: Sequence[str] = (
        *DecoratedOperator.template_fields,
        *TrainOperator.template_fields,
    )
    custom_operator_name = "@task.trainwright_train"
    input_name = "job"
    paths = True


class ValidateFromFunction(FromFunction, ValidateOperator):
    """`ValidateOperator` on the data that a function names."""

    template_fields: Sequence[str] = (
        *DecoratedOperator.template_fields,
        *ValidateOperator.template_fields,
    )
    custom_operator_name = "@task.trainwright_validate"
    input_name = "data"


def train_task(python_callable: Callable[..., Any] | None = None, **inputs: Any) -> TaskDecorator:
    """`@task.trainwright_train`: train on the job, a mapping or a job file's path, that the function returns.

    Takes the inputs of `TrainOperator`, without `job` and `run`, and those of every task; returns what `TrainOperator` returns.
    """
    return _decorator(TrainFromFunction, ("job", "run"), python_callable, inputs)


def validate_task(
    python_callable: Callable[..., Any] | None = None, **inputs: Any
) -> TaskDecorator:
    """`@task.trainwright_validate`: a gate on the data, a mapping as in a job file, that the function returns.

    Takes the inputs of `ValidateOperator`, without `data`, `job` and `run`, and those of every task; returns what it returns.
    """
    return _decorator(ValidateFromFunction, ("data", "job", "run"), python_callable, inputs)


def _decorator(
    operator: type[FromFunction],
    refused: Collection[str],
    function: Callable[..., Any] | None,
    inputs: dict[str, Any],
) -> TaskDecorator:
    for name in refused:
        if name in inputs:
            raise TypeError(
                f"{operator.custom_operator_name}: got {name}=; allowed: the function returns `{operator.input_name}`"
            )
    # The annotation of the function is of what it returns, not of the task's result, from which Airflow would infer it.
    inputs.setdefault("multiple_outputs", False)
    return task_decorator_factory(function, decorated_operator_class=operator, **inputs)
