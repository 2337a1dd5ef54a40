"""TaskFlow decorators, one per step: a function returns the job, and the operator does the work.

    @task.trainwright_train(device_pool="lab.yaml")
    def train(table: str, width: int) -> dict:
        model = {"source": "/models/m.py", "config": {"width": width}}
        return {"name": "mine", "data": {"uri": table}, "model": model}

    train.partial(table=make_table()).expand(width=[32, 64])

A decorator's name is `trainwright_` plus the step's name. With `trainwright_validate` the function
returns the data (`{"uri": …}`).

The function runs on the worker and gets upstream results and the context as any TaskFlow function
does. The decorator takes the operator's inputs. Templates in the returned value are not rendered.
A retry calls the function again; if it returns the same job, training resumes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar

from airflow.sdk import Context
from airflow.sdk.bases.decorator import (
    DecoratedOperator,
    TaskDecorator,
    determine_kwargs,
    task_decorator_factory,
)
from airflow.sdk.definitions.context import context_merge

from trainwright.operators.base import operator_of
from trainwright.operators.failures import airflow_errors
from trainwright.tasks.chain import StepSpec, steps
from trainwright.tasks.errors import BadInput


class FromFunction(DecoratedOperator):
    """An operator that gets one of its inputs from a function when the task runs."""

    function_returns: ClassVar[str]

    def execute(self, context: Context) -> Any:
        """Call the function, then do the step."""
        context_merge(context, self.op_kwargs)
        kwargs = determine_kwargs(self.python_callable, self.op_args, context)
        returned = self.python_callable(*self.op_args, **kwargs)
        with airflow_errors():
            setattr(self, self.function_returns, self._checked(returned))
        # The UI then shows the returned value as a rendered field. After a deferral another
        # instance runs, which has not called the function; it must not overwrite the field.
        self.overwrite_rtif_after_execution = True
        return super().execute(context)

    def _checked(self, returned: object) -> dict[str, Any] | str:
        if isinstance(returned, Mapping):
            return dict(returned)
        may_be_path = self.function_returns == "job"
        if may_be_path and isinstance(returned, str | os.PathLike) and str(returned).strip():
            return os.fspath(returned)
        allowed = "a mapping, as in a job file" + (", or a job file's path" if may_be_path else "")
        raise BadInput(
            f"{self.task_id}: the function returned {returned!r:.80} "
            f"for `{self.function_returns}`; allowed: {allowed}"
        )


def __getattr__(name: str) -> Callable[..., TaskDecorator]:
    """`<step>_task`: the decorator of a step, ours or a registered one."""
    step = next((one for one in steps() if name == f"{one.name}_task"), None)
    if step is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _decorator_of(step)


@cache
def _decorator_of(step: StepSpec) -> Callable[..., TaskDecorator]:
    base = operator_of(step)
    operator = type(
        f"{base.__name__.removesuffix('Operator')}FromFunction",
        (FromFunction, base),
        {
            "__doc__": f"`{base.__name__}` with the `{base.function_returns}` of a function.",
            "__module__": __name__,
            "template_fields": (*DecoratedOperator.template_fields, *base.template_fields),
            "custom_operator_name": f"@task.trainwright_{step.name}",
        },
    )

    def decorator(
        python_callable: Callable[..., Any] | None = None, **inputs: Any
    ) -> TaskDecorator:
        return _decorated(operator, python_callable, inputs)

    decorator.__doc__ = f"""Do the step `{step.name}` with what the function returns.

    Takes the inputs of `{base.__name__}` except `{base.function_returns}`, `job` and `run`, and
    those of every task. Returns what `{base.__name__}` returns.
    """
    return decorator


def _decorated(
    operator: type[Any], function: Callable[..., Any] | None, inputs: dict[str, Any]
) -> TaskDecorator:
    for name in (operator.function_returns, "job", "run"):
        if name in inputs:
            raise TypeError(
                f"{operator.custom_operator_name}: got {name}=; "
                f"leave it out: the function returns `{operator.function_returns}`"
            )
    # Airflow would infer it from the function's return type, which is not the type of the task's
    # result.
    inputs.setdefault("multiple_outputs", False)
    return task_decorator_factory(function, decorated_operator_class=operator, **inputs)
