"""Devices and samples dealt to several pipelines."""

from __future__ import annotations

import itertools

from chain_cases import brute_force
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_plans import problem
from pipeline_cases import blocks, units_of

from trainwright.tasks.allocate.layouts.choose import micro_batches
from trainwright.tasks.allocate.pipelines.pipeline_search import PipelineSearch
from trainwright.tasks.allocate.pipelines.replicas import batch_shares, exchanges, groupings
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.spec.train_spec import LayoutSpec


@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0.5, 4.0)), min_size=2, max_size=12),
    st.integers(1, 4),
)
def test_every_device_is_in_one_group(devices: list[tuple[int, float]], replicas: int) -> None:
    kinds, speeds = zip(*devices, strict=True)
    machines = [f"machine-{number // 2}" for number in range(len(devices))]
    if replicas > len(devices):
        return
    for groups in groupings(kinds, speeds, machines, replicas):
        assert len(groups) == replicas
        assert sorted(itertools.chain(*groups)) == list(range(len(devices)))
        for changed in exchanges(groups, kinds):
            assert sorted(itertools.chain(*changed)) == list(range(len(devices)))
            assert all(changed)


def test_devices_of_two_kinds_are_dealt_so_that_groups_are_about_as_fast() -> None:
    kinds, speeds = (0, 0, 1, 1), (4.0, 4.0, 1.0, 1.0)
    dealt, together = groupings(kinds, speeds, ["a", "a", "b", "b"], 2)
    assert sorted(dealt) == [[0, 2], [1, 3]]
    assert together == [[0, 1], [2, 3]]


@given(
    st.integers(1, 2000),
    st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6),
    st.integers(1, 16),
)
def test_shares_are_the_whole_batch_with_a_sample_for_each_micro_batch(
    batch: int, speeds: list[float], parts: int
) -> None:
    found = batch_shares(batch, speeds, parts)
    if batch <= parts * len(speeds):
        return
    assert sum(found) == batch
    assert min(found) >= parts
    for one, other in itertools.permutations(range(len(speeds)), 2):
        if speeds[one] >= speeds[other]:
            assert found[one] >= found[other] - 1


def staged(cores: tuple[float, ...], **options: object) -> PlanningProblem:
    layers = blocks()
    given = problem(layers, hosts=len(cores), cores=cores, fewest=1, **options)
    estimate = given.model.estimate.model_copy(update={"units": units_of(layers)})
    model = given.model.with_estimate(estimate)
    return PlanningProblem.of(given.job, model, given.devices)


@settings(max_examples=4, deadline=None)
@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=4, max_size=4))
def test_two_pipelines_of_unlike_devices_are_about_as_good_as_by_brute_force(
    cores: list[float],
) -> None:
    spec = LayoutSpec(name="pipeline", replicas=2, micro_batches=4, schedule="1f1b")
    search = PipelineSearch(staged(tuple(cores), network="10Gbit"), spec)
    found = search.found(64)
    best = float("inf")
    for size in (1, 2):
        for group in itertools.combinations(range(4), size):
            rest = [one for one in range(4) if one not in group]
            for samples in range(4, 61, 8):
                pairs = ((group, samples), (rest, 64 - samples))
                steps = [
                    brute_force(search._chain(micro_batches(size, 4)).of_devices(own), "1f1b")
                    for own, size in pairs
                ]
                best = min(best, max(steps))
    assert found[0].step_s <= 1.15 * best
