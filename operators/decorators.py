"""TaskFlow decorators: a function returns the job or the data, and the operator does the work.

    @task.trainwright_train(device_pool="lab.yaml")
    def train(table: str, width: int) -> dict:
        model = {"source": "/models/m.py", "config": {"width": width}}
        return {"name": "mine", "data": {"uri": table}, "model": model}

    train.partial(table=make_table()).expand(width=[32, 64])

The function runs on the worker and gets upstream results and the context as any TaskFlow function
does. The decorator takes the operator's inputs. Templates in the returned value are not rendered.
A retry calls the function again; if it returns the same job, training resumes.
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
    """An operator that gets one of its inputs from a function when the task runs."""

    input_name: ClassVar[str]
    paths: ClassVar[bool] = False
    """Whether the function may return a file's path instead of the mapping."""

    def execute(self, context: Context) -> Any:
        """Call the function, then do the step."""
        context_merge(context, self.op_kwargs)
        kwargs = determine_kwargs(self.python_callable, self.op_args, context)
        returned = self.python_callable(*self.op_args, **kwargs)
        with airflow_errors():
            setattr(self, self.input_name, self._checked(returned))
        # The UI then shows the returned value as a rendered field. After a deferral another
        # instance runs, which has not called the function; it must not overwrite the field.
        self.overwrite_rtif_after_execution = True
        return super().execute(context)

    def _checked(self, returned: object) -> dict[str, Any] | str:
        if isinstance(returned, Mapping):
            return dict(returned)
        if self.paths and isinstance(returned, str | os.PathLike) and str(returned).strip():
            return os.fspath(returned)
        allowed = "a mapping, as in a job file" + (", or a job file's path" if self.paths else "")
        raise BadInput(
            f"{self.task_id}: the function returned {returned!r:.80} for `{self.input_name}`; "
            f"allowed: {allowed}"
        )


class TrainFromFunction(FromFunction, TrainOperator):
    """`TrainOperator` with the job that a function returns."""

    template_fields: Sequence[str] = (
        *DecoratedOperator.template_fields,
        *TrainOperator.template_fields,
    )
    custom_operator_name = "@task.trainwright_train"
    input_name = "job"
    paths = True


class ValidateFromFunction(FromFunction, ValidateOperator):
    """`ValidateOperator` with the data that a function returns."""

    template_fields: Sequence[str] = (
        *DecoratedOperator.template_fields,
        *ValidateOperator.template_fields,
    )
    custom_operator_name = "@task.trainwright_validate"
    input_name = "data"


def train_task(python_callable: Callable[..., Any] | None = None, **inputs: Any) -> TaskDecorator:
    """`@task.trainwright_train`: train the job that the function returns (mapping or file's path).

    Takes the inputs of `TrainOperator` except `job` and `run`, and those of every task. Returns
    what `TrainOperator` returns.
    """
    return _decorator(TrainFromFunction, ("job", "run"), python_callable, inputs)


def validate_task(
    python_callable: Callable[..., Any] | None = None, **inputs: Any
) -> TaskDecorator:
    """`@task.trainwright_validate`: check the data that the function returns (a mapping).

    Takes the inputs of `ValidateOperator` except `data`, `job` and `run`, and those of every
    task. Returns what `ValidateOperator` returns.
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
                f"{operator.custom_operator_name}: got {name}=; "
                f"leave it out: the function returns `{operator.input_name}`"
            )
    # Airflow would infer it from the function's return type, which is not the type of the task's
    # result.
    inputs.setdefault("multiple_outputs", False)
    return task_decorator_factory(function, decorated_operator_class=operator, **inputs)
