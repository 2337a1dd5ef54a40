"""Candidates' structures for tests that only read them: each is traced once in a process."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from trainwright.estimator.structure import Structure
from trainwright.tasks.extract import batch_spec
from trainwright.tasks.recommend import candidate_costs
from trainwright.tasks.recommend.proposals import Proposal
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.recipe import with_recipe

_trace = candidate_costs.traced
_known: dict[str, Structure] = {}


def traced(
    proposals: Sequence[Proposal], job: Job, given: Collection[str], settings: Settings
) -> dict[str, Structure]:
    """What `candidate_costs.traced` returns; only requests that it had not before are traced."""

    def request(one: Proposal) -> str:
        train = with_recipe(job, one.recipe, given).train
        what = (train.optimizer, train.precision, train.label_smoothing)
        return repr((one.source(), batch_spec(one.schema), what, settings.extract_limits()))

    requests = {one.name: request(one) for one in proposals}
    unknown = [one for one in proposals if requests[one.name] not in _known]
    if unknown:
        found = _trace(unknown, job, given, settings)
        _known.update({requests[name]: structure for name, structure in found.items()})
    return {name: _known[request] for name, request in requests.items()}


def trace_once(patch: pytest.MonkeyPatch) -> None:
    """Let recommendations in this process share the structures."""
    patch.setattr(candidate_costs, "traced", traced)
