"""Which pipelines are not possible at all, and why."""

from __future__ import annotations

from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.train_spec import LayoutSpec


def why_no_pipeline(problem: PlanningProblem) -> str | None:
    """Why the problem's model can't be cut on its devices; None if it can."""
    estimate = problem.model.estimate
    curves = [problem.model.kind(device).curve for device in problem.devices]
    if not estimate.layers or any(len(one.layers) < len(estimate.layers) for one in curves):
        return "the estimate does not say what each layer costs; estimate again"
    if len(estimate.units) < 2:
        reason = estimate.not_cut or "it has no place where it can be cut"
        return f"the model can't be cut into stages: {reason}"
    if len(problem.devices) < 2 or problem.job.devices.max_count == 1:
        return "pipelines need two devices; the job may use one"
    if problem.job.train.adaptive_batch:
        return "the micro-batches of pipelines are fixed, and adaptive_batch changes the batch"
    return None


def refuse(problem: PlanningProblem, spec: LayoutSpec) -> None:
    """Raise BadInput if the job's pipelines are not possible at all."""
    where = "train.layout" + (": got 'pipeline'" if spec == LayoutSpec(name="pipeline") else "")
    if (reason := why_no_pipeline(problem)) is not None:
        raise BadInput(f"{where}: {reason}")
    if spec.recompute == "all" and problem.model.estimate.step is None:
        raise BadInput(
            "train.layout.recompute: got 'all'; the estimate does not say what each module keeps; "
            "extract and estimate again"
        )
    units, devices = len(problem.model.estimate.units), len(problem.devices)
    most = min(devices, problem.job.devices.max_count or devices)
    stages, replicas = spec.stages or 2, spec.replicas or 1
    if stages > units:
        raise BadInput(
            f"train.layout.stages: got {stages}; the model has {units} units: at most one stage "
            "each"
        )
    if stages * replicas > most:
        asked = "train.layout.replicas" if spec.replicas else "train.layout.stages"
        raise BadInput(
            f"{asked}: got {spec.replicas or stages}, which takes {stages * replicas} devices; "
            f"the job may use {most}"
        )
    parts, size = spec.micro_batches, max(problem.sizes)
    if parts is not None and parts * replicas > size:
        raise BadInput(
            f"train.layout.micro_batches: got {parts}; allowed: at most the samples of a pipeline, "
            f"{size // replicas}"
        )
    joint = next((one for one in problem.model.estimate.units if one.batch_statistics), None)
    if spec.batch_norm == "micro-batch" and joint is None:
        raise BadInput(
            "train.layout.batch_norm: got 'micro-batch'; the model has no layer that normalises by "
            "statistics of the batch"
        )
    if parts not in (None, 1) and joint is not None and spec.batch_norm == "joint":
        raise BadInput(
            f"train.layout.micro_batches: got {parts}; allowed: 1: {joint.name} normalises by "
            "statistics of the whole batch; more with train.layout.batch_norm: micro-batch"
        )
