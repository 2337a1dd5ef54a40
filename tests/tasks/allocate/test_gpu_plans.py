"""Plans on GPUs by their datasheets, for a transformer: cases that went wrong before."""

from __future__ import annotations

from typing import Any

import doors
import pytest
from plans import DATA
from torch import Tensor, nn

from trainwright.estimator.structure import Structure
from trainwright.estimator.trace.source import BatchSpec, ModelDefinition
from trainwright.estimator.trace.trace import TrainingStepSpec, trace
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.errors import Infeasible
from trainwright.tasks.estimate.pool_estimate import estimate
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.eligibility import usable
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Pool

L40S = {"type": "nvidia-l40s", "count": 2}


class _Transformer(nn.Module):
    """25 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.head = nn.Linear(512, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(inputs).mean(1))
        return logits


@pytest.fixture(scope="module")
def structure() -> Structure:
    rows = BatchSpec(
        inputs={"inputs": (64, 512)},
        input_dtypes={"inputs": "float32"},
        target_dtype="int64",
        classes=10,
        task="sequence-classification",
    )
    definition = ModelDefinition(_Transformer, None, None)
    return trace(TrainingStepSpec(definition, {}, rows, {"name": "adamw"}, "fp32"), 16)


def plan(structure: Structure, hosts: list[dict[str, Any]], **fields: Any) -> Plan:
    """The plan of a job with these fields on these hosts, which have 1 Gbit between them."""
    pool = Pool.model_validate({"name": "p", "network": {"bandwidth": "1Gbit"}, "hosts": hosts})
    values = {"name": "j", "data": {"uri": "x"}, "objective": {"minimize": "time"}, **fields}
    job = Job.model_validate(values)
    # Of all devices, so that a restriction changes the choice and not the curves.
    found = estimate(structure, pool.devices(), settings=doors.settings())
    return make_plan(job, pool, found, DATA, usable(pool, job))


def duration(found: Plan) -> float:
    return found.predicted.duration_s.median


def energy(found: Plan) -> float:
    assert found.predicted.energy_j is not None
    return found.predicted.energy_j.median


def far(name: str, *devices: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"name": name, "address": f"{name}.example", "devices": list(devices), **fields}


def test_two_gpus_are_no_slower_than_one(structure: Structure) -> None:
    hosts, batch = [far("a", L40S)], {"global_batch_size": 32}
    free = plan(structure, hosts, train=batch)
    one = plan(structure, hosts, train=batch, devices={"max_count": 1})
    assert duration(free) <= duration(one)


def test_a_slow_device_on_another_host_does_not_replace_the_fast_one(structure: Structure) -> None:
    hosts = [
        {"name": "here", "devices": [{"type": "nvidia-a100-40gb"}]},
        far("slow", {"type": "emulated", "speed": 0.001}),
    ]
    fields: dict[str, Any] = {
        "objective": {"minimize": "energy"},
        "train": {"global_batch_size": 64},
    }
    free = plan(structure, hosts, **fields)
    only = plan(structure, hosts, devices={"types": ["nvidia-a100-40gb"]}, **fields)
    assert energy(free) == energy(only)


def test_the_network_is_that_of_the_chosen_devices_hosts(structure: Structure) -> None:
    hosts = [
        far("a", L40S, network={"bandwidth": "1Gbit"}, inner={"bandwidth": "1Gbit"}),
        far("b", L40S, network={"bandwidth": "100Gbit"}, inner={"bandwidth": "100Gbit"}),
    ]
    train = {"global_batch_size": 64}
    free = plan(structure, hosts, train=train, devices={"min_count": 2})
    ids = [device.id for device in free.devices]
    assert duration(free) == duration(plan(structure, hosts, train=train, devices={"ids": ids}))
    forced = {"hosts": ["a"], "min_count": 2}
    assert duration(free) < duration(plan(structure, hosts, train=train, devices=forced))
    assert {device.host for device in free.devices} == {"b"}


def test_like_gpus_of_a_host_sum_over_their_own_link_and_others_through_its_memory(
    structure: Structure,
) -> None:
    train = {"global_batch_size": 256}
    both = {"min_count": 2}
    a100, t4 = {"type": "nvidia-a100-80gb", "count": 2}, {"type": "nvidia-t4", "count": 2}
    quick = plan(structure, [far("a", a100)], train=train)
    assert quick.strategy["name"] == "data-parallel"
    assert len(quick.devices) == 2
    link = quick.links["a.example"]
    assert link.sums is not None
    assert link.sums.bandwidth_bytes_per_s == 0.5 * 300e9
    assert link.source == "NVLink 3, assumed: 50% of the datasheet of nvidia-a100-80gb"
    slow = plan(structure, [far("a", t4)], train=train, devices=both)
    assert slow.links["a.example"].source.startswith("PCIe 3.0 x16, assumed")
    given = {"bandwidth": "4Gbit", "latency": "300us"}
    stated = plan(structure, [far("a", a100, inner=given)], train=train, devices=both)
    assert stated.links["a.example"].source == "NVLink 3, as the pool file states"
    assert duration(stated) > duration(quick)
    one = [{"type": "nvidia-a100-80gb"}, {"type": "nvidia-t4"}]
    mixed = plan(structure, [far("a", *one)], train=train, devices=both)
    assert mixed.links["a.example"].sums is None
    assert mixed.links["a.example"].source == "memory of the host, assumed"


def test_any_batch_is_planned_with_the_micro_batches_that_fit(structure: Structure) -> None:
    small = estimate(
        structure,
        Pool.model_validate({"name": "p", "hosts": [far("a", {"type": "nvidia-l4"})]}).devices(),
        settings=doors.settings(),
    )
    [curve] = small.curves
    # As much memory as 6 samples need, beside the gradients that are kept between micro-batches.
    tight = curve.model_copy(
        update={"memory_limit_bytes": curve.device_memory_bytes(6) + small.gradient_bytes}
    )
    found = small.model_copy(update={"curves": [tight]})
    pool = Pool.model_validate({"name": "p", "hosts": [far("a", {"type": "nvidia-l4"})]})
    for batch in (7, 8, 9, 10, 12, 16, 20, 24, 32, 64, 128):
        job = Job.model_validate(
            {
                "name": "j",
                "data": {"uri": "x"},
                "objective": {"minimize": "time"},
                "train": {"global_batch_size": batch, "layout": {"recompute": "none"}},
            }
        )
        made = make_plan(job, pool, found, DATA)
        micro, kept = -(-batch // made.accumulation), small.gradient_bytes
        need = tight.device_memory_bytes(micro) + (kept if made.accumulation > 1 else 0)
        assert need <= (tight.memory_limit_bytes or 0)
        assert made.devices[0].batch_size == batch


def test_memory_limits_only_the_devices_of_its_host(structure: Structure) -> None:
    cpu = {"type": "emulated", "speed": 1.0}
    there, small = far("there", cpu), {"name": "here", "memory": "1MB", "devices": [cpu]}
    alone, both = plan(structure, [there]), plan(structure, [small, there])
    assert duration(both) == duration(alone)
    assert [device.host for device in both.devices] == ["there"]
    with pytest.raises(Infeasible, match="memory"):
        plan(structure, [small])
    with pytest.raises(Infeasible, match="memory"):
        plan(structure, [there | {"memory": "1MB"}])


def test_a_faster_device_of_another_host_is_chosen(structure: Structure) -> None:
    hosts = [
        {"name": "here", "devices": [{"type": "emulated", "speed": 0.5}]},
        far("there", {"type": "emulated", "speed": 4.0}),
    ]
    for minimize in ("time", "energy"):
        made = plan(structure, hosts, objective={"minimize": minimize})
        assert [device.speed for device in made.devices] == [4.0]
