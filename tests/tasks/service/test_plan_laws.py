"""Laws that plans keep, by REST; `tests/tasks/allocate/test_laws.py` has many more cases."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from serving import JOB, JOBS, READ, SPEC, client, model, serving

GPUS = ["nvidia-a100-40gb", "nvidia-l4", "nvidia-t4", "nvidia-p100-16gb"]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("service"), "--workers", "1") as found:
        yield found


@pytest.fixture(scope="module")
def structure(address: str) -> Any:
    with client(address) as run:
        answer = run.post(
            "/structures",
            json={"model": model((JOBS / "cnn.py").read_text(), width=64), "spec": SPEC},
        )
    assert answer.status_code == 200, answer.text
    return answer.json()


def _drawn(seed: int) -> dict[str, Any]:
    """A job on up to five GPUs of up to three hosts."""
    draw = random.Random(seed)
    hosts = [
        {
            "name": f"h{number}",
            "address": f"10.0.0.{number}",
            "devices": [{"type": draw.choice(GPUS)} for _ in range(draw.randint(1, 2))],
            "network": draw.choice([{}, {"bandwidth": "100Mbit"}]),
        }
        for number in range(draw.randint(1, 3))
    ]
    return JOB | {
        "pool": {
            "name": "p",
            "hosts": hosts,
            "prices": {one: f"{draw.uniform(0, 3):.2f}/h" for one in GPUS} | {"energy": "0.3/kWh"},
        },
        "rows": draw.randint(1000, 100_000),
        "train": {"global_batch_size": draw.randint(8, 300), "epochs": draw.randint(1, 20)},
        "objective": {"minimize": draw.choice(["time", "energy", "cost"])},
    }


@pytest.mark.parametrize("seed", range(4))
def test_a_subset_is_no_better_and_the_plans_own_limits_keep_it(
    address: str, structure: dict[str, Any], seed: int
) -> None:
    job = _drawn(seed) | {"structure": structure}
    goal = {"time": "duration_s", "energy": "energy_j", "cost": "cost"}[
        job["objective"]["minimize"]
    ]
    with client(address, READ) as reader:

        def value(changes: dict[str, Any]) -> tuple[float, dict[str, Any]]:
            answer = reader.post("/plans", json=job | changes)
            assert answer.status_code == 200, answer.text
            plan = answer.json()
            least = plan["predicted"][goal]["median"] if plan["feasible"] else math.inf
            return least, plan

        best, plan = value({})
        ids = [
            f"{host['name']}/{kind}-{number}"
            for host in job["pool"]["hosts"]
            for kind, some in itertools.groupby(sorted(one["type"] for one in host["devices"]))
            for number in range(len(list(some)))
        ]
        subsets = [some for n in range(1, len(ids)) for some in itertools.combinations(ids, n)]
        for some in subsets[::3]:
            assert value({"devices": {"ids": list(some)}})[0] >= best * (1 - 1e-7), some
        most = plan["not_exceeded"]
        limits = {"deadline": f"{most['duration_s']!r}s", "budget": most["cost"]}
        kept, _ = value({"objective": job["objective"] | limits})
        assert kept <= best * (1 + 1e-7)
        used = [device["id"] for device in plan["devices"]]
        assert value({"devices": {"ids": used}})[0] == pytest.approx(best, rel=1e-7)
        assert plan["search"] == "exact", json.dumps(job)
