"""`trainwright serve`: a real server, its clients, its limits, and misbehaving models."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import doors
import httpx
import psutil
import pytest
from serving import JOB, JOBS, POOL, READ, RUN, SPEC, client, model, serving

from trainwright.estimator.trace.source import BatchSpec
from trainwright.tasks.allocate.preview import plan_job
from trainwright.tasks.extract import extract_model
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.service.auth import token_from
from trainwright.tasks.service.server import listening
from trainwright.tasks.spec.job import load_job
from trainwright.tasks.spec.train_spec import TrainSpec

CNN = (JOBS / "cnn.py").read_text()
SLEEPS = "import time\ntime.sleep(100)\n"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(
        tmp_path_factory.mktemp("service"), "--workers", "1", "--queue", "1", "--timeout", "60"
    ) as found:
        yield found


@pytest.fixture(scope="module")
def structure(address: str) -> Any:
    with client(address) as run:
        answer = run.post("/structures", json={"model": model(CNN, width=8), "spec": SPEC})
    assert answer.status_code == 200, answer.text
    return answer.json()


def _refusal(answer: httpx.Response, status: int, kind: str) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["kind"] == kind
    assert "\n" not in error["message"]
    return str(error["message"])


def test_the_structure_equals_the_command_lines(structure: Any) -> None:
    same = extract_model(
        {"source": str(JOBS / "cnn.py"), "config": {"width": 8}},
        doors.settings(),
        spec=BatchSpec.model_validate(SPEC),
    )
    assert structure == same.model_dump(mode="json")


def test_a_structure_with_label_smoothing_is_that_of_a_job_with_it(
    address: str, structure: Any
) -> None:
    request = {"model": model(CNN, width=8), "spec": SPEC, "label_smoothing": 0.1}
    with client(address) as run:
        smoothed = run.post("/structures", json=request).json()
        says = _refusal(
            run.post("/structures", json=request | {"label_smoothing": 1}), 422, "bad_input"
        )
    assert says == "request: label_smoothing: got 1; allowed: less than 1"
    same = extract_model(
        {"source": str(JOBS / "cnn.py"), "config": {"width": 8}},
        doors.settings(),
        spec=BatchSpec.model_validate(SPEC),
        label_smoothing=0.1,
    )
    assert smoothed == same.model_dump(mode="json")
    assert smoothed["operations"] != structure["operations"]


def test_an_estimate_from_a_structure_equals_the_command_lines(
    address: str, structure: Any, tmp_path: Path
) -> None:
    path = tmp_path / "structure.json"
    path.write_text(json.dumps(structure))
    command = [
        sys.executable,
        "-m",
        "trainwright.tasks.cli.main",
        "estimate",
        str(path),
        "--batch-size",
        "64",
    ]
    printed = subprocess.run(
        [*command, "--device-type", "nvidia-t4", "--json"], capture_output=True, check=True
    ).stdout
    request = {"structure": structure, "batch_size": 64, "device_type": "nvidia-t4"}
    with client(address, READ) as reader:
        assert reader.post("/estimates", json=request).json() == json.loads(printed)
        assert reader.post("/estimates", json=request).json() == json.loads(printed)


def test_a_plan_takes_and_shows_a_layout(address: str, structure: Any) -> None:
    job = JOB | {"structure": structure, "rows": 1000, "devices": {"min_count": 3}}
    given = {"dense": "factors", "chunk_bytes": 65536}
    with client(address, READ) as reader:
        plan = Plan.model_validate(
            reader.post("/plans", json=job | {"train": {"layout": given}}).json()
        )
        assert plan.layout is not None
        assert (plan.strategy["name"], plan.layout.chunk_bytes) == ("hybrid", 65536)
        assert "late-multiply: " in plan.layout_in_words
        assert plan.layout_rule == "as train.layout says"
        assert {one.sync for one in plan.by_layer} == {"sum", "factors"}
        assert any(one.layout_in_words.startswith("all layers data") for one in plan.alternatives)
        for layout, says in (
            ("fast", "request: train.layout: got 'fast'; allowed: a mapping of fields or 'auto'"),
            ({"dense": "some"}, "request: train.layout.dense: got 'some'; allowed: 'auto', 'sum'"),
            ({"dens": "rows"}, "request: train.layout.dens: unknown field"),
        ):
            answer = reader.post("/plans", json=job | {"train": {"layout": layout}})
            assert _refusal(answer, 422, "bad_input").startswith(says)
        alone = job | {"devices": {"max_count": 1}, "train": {"layout": "sharded"}}
        says = _refusal(reader.post("/plans", json=alone), 422, "bad_input")
        assert says.startswith("train.layout: got 'sharded'; the plan has one device")


def test_a_plan_for_a_job_equals_the_command_lines(address: str, tmp_path: Path) -> None:
    job = JOB | {"model": {"source": "cnn.py", "config": {"width": 8}}}
    with client(address) as run:
        answer = run.post("/plans", json=job)
    assert answer.status_code == 200, answer.text
    pool = tmp_path / "pool.json"
    pool.write_text(json.dumps(JOB["pool"]))
    source = {"source": str(JOBS / "cnn.py"), "config": {"width": 8}}
    local = plan_job(load_job({**job, "pool": str(pool), "model": source}), doors.settings())
    ours, theirs = Plan.model_validate(answer.json()), local
    assert ours.model_copy(update={"solve_time_s": 0}) == theirs.model_copy(
        update={"solve_time_s": 0}
    )


def test_a_reader_plans_from_a_structure_and_rows_and_an_impossible_deadline_is_an_answer(
    address: str, structure: Any
) -> None:
    job = JOB | {"structure": structure, "rows": 50_000}
    with client(address, READ) as reader:
        plan = reader.post("/plans", json=job).json()
        assert plan["feasible"]
        late = reader.post("/plans", json=job | {"objective": {"deadline": "1ms"}})
    assert late.status_code == 200
    assert late.json()["feasible"] is False
    assert late.json()["error"]["binding"] == "deadline"
    assert late.json()["error"]["nearest_deadline_s"] > 0


def test_requests_without_a_valid_token_are_refused(address: str) -> None:
    for method, path in (
        ("GET", "/devices"),
        ("GET", "/pool"),
        ("GET", "/openapi.json"),
        ("POST", "/plans"),
        ("POST", "/estimates"),
        ("POST", "/structures"),
        ("POST", "/recommendations"),
    ):
        for header in ("", "Bearer wrong", f"Basic {RUN}", f"Bearer {RUN}x"):
            content = b"{" if method == "POST" else None
            headers = {"Authorization": header}
            answer = httpx.request(
                method, address + path, headers=headers, content=content, timeout=60
            )
            _refusal(answer, 401, "unauthorized")
            assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_a_reader_can_not_run_code_read_data_or_measure(address: str, structure: Any) -> None:
    with client(address, READ) as reader:
        _refusal(reader.post("/structures", json={"model": model(CNN)}), 403, "forbidden")
        estimate = {"model": model(CNN), "batch_size": 8, "device_type": "cpu"}
        _refusal(reader.post("/estimates", json=estimate), 403, "forbidden")
        _refusal(reader.post("/plans", json=JOB | {"model": model(CNN)}), 403, "forbidden")
        data = JOB | {"structure": structure, "data": {"uri": "s3://bucket/data.parquet"}}
        _refusal(reader.post("/plans", json=data), 403, "forbidden")
        here = {
            "structure": structure,
            "rows": 1000,
            "name": "here",
            "data": {"uri": "builtin:digits"},
        }
        assert "calibrations" in _refusal(reader.post("/plans", json=here), 403, "forbidden")


@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("/structures", {"model": {"source": "../../pyproject.toml"}}),
        ("/structures", {"model": {"source": "/etc/passwd"}}),
        ("/structures", {"model": {"source": "../../tests/conftest.py"}}),
        ("/structures", {"model": {"source": "os"}}),
        ("/structures", {"model": {"source": "m.py", "files": {"m.py": "", "../n.py": ""}}}),
        ("/plans", JOB | {"pool": "../../pyproject.toml", "model": {"source": "cnn.py"}}),
        ("/plans", JOB | {"pool": "no-such", "model": {"source": "cnn.py"}}),
        ("/plans", JOB | {"data": {"uri": "/etc/passwd"}, "model": {"source": "cnn.py"}}),
        ("/plans", JOB | {"data": {"uri": "file:///etc/passwd"}, "model": {"source": "cnn.py"}}),
        ("/plans", JOB),
        ("/plans", {"root:*:20228:": 1, "model": {"source": "cnn.py"}}),
        ("/plans", JOB | {"pool": POOL | {"hosts": []}, "model": {"source": "cnn.py"}}),
        ("/estimates", {"batch_size": 1, "device_type": "cpu"}),
        ("/estimates", {"model": {"source": "cnn.py"}, "batch_size": 0, "device_type": "cpu"}),
    ],
)
def test_wrong_or_unserved_inputs_give_one_clear_line(
    address: str, path: str, request_: Any
) -> None:
    with client(address) as run:
        message = _refusal(run.post(path, json=request_), 422, "bad_input")
    assert "root:" not in message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"spec": SPEC | {"inputs": {"inputs": [-1, 8]}}},
            "inputs with sizes of 1 to 100000000, 'inputs' has [-1, 8]",
        ),
        ({"spec": SPEC | {"inputs": {"inputs": [10**9]}}}, "'inputs' has [1000000000]"),
        (
            {"spec": SPEC | {"input_dtypes": {}}},
            "spec: allowed: input_dtypes of all inputs, 'inputs' has none",
        ),
        ({"spec": SPEC | {"target_dtype": "float99"}}, "such as float32 or int64, not 'float99'"),
        (
            {"spec": SPEC | {"classes": -1}},
            "spec.classes: got -1; allowed: greater than or equal to 1",
        ),
        (
            {"model": model(CNN) | {"files": {f"m{n}.py": "" for n in range(201)}}},
            "allowed: at most 200 item(s)",
        ),
    ],
)
def test_an_impossible_shape_is_reported_with_its_field(
    address: str, change: dict[str, Any], says: str
) -> None:
    with client(address) as run:
        request = {"model": model(CNN, width=8), "spec": SPEC} | change
        assert says in _refusal(run.post("/structures", json=request), 422, "bad_input")


def test_an_unknown_device_type_is_refused(address: str, structure: Any) -> None:
    with client(address, READ) as reader:
        for name in ("", "abacus", "x" * 5000):
            request = {"structure": structure, "batch_size": 64, "device_type": name}
            message = _refusal(reader.post("/estimates", json=request), 422, "bad_input")
            assert message.startswith(f"device type: got {name[:80]!r}; allowed: amd-mi300x, ")
            assert len(message) < 500


def test_an_impossible_number_of_rows_is_refused(address: str, structure: Any) -> None:
    schema = {
        "task": "image-classification",
        "rows": 100,
        "train_rows": 80,
        "validation_rows": 20,
        "inputs": SPEC["inputs"],
        "input_dtypes": SPEC["input_dtypes"],
        "target": "label",
        "target_dtype": "int64",
        "sha256": "",
    }
    with client(address, READ) as reader:
        assert (
            reader.post(
                "/plans", json=JOB | {"structure": structure, "data_schema": schema}
            ).status_code
            == 200
        )
        for change in (
            {"rows": -5},
            {"train_rows": 0},
            {"train_rows": 10**20},
            {"inputs": {"inputs": [0]}},
        ):
            asked = JOB | {"structure": structure, "data_schema": schema | change}
            message = _refusal(reader.post("/plans", json=asked), 422, "bad_input")
            assert "data_schema" in message
            assert next(iter(change)) in message


def test_an_accuracy_in_percent_is_refused(address: str, structure: Any) -> None:
    asked = JOB | {"structure": structure, "rows": 1000, "train": {"target": {"value": 97}}}
    with client(address, READ) as reader:
        message = _refusal(reader.post("/plans", json=asked), 422, "bad_input")
    assert (
        message == "request: train.target.value: got 97; "
        "allowed: a share above 0, up to 1, such as 0.97 for 97 %"
    )


def test_a_structure_with_another_optimizer_or_precision_is_the_clients_error(
    address: str, structure: Any
) -> None:
    with client(address, READ) as reader:
        request = {"structure": structure, "batch_size": 64, "device_type": "nvidia-t4"}
        assert (
            reader.post(
                "/estimates", json=request | {"optimizer": "adamw", "precision": "fp32"}
            ).status_code
            == 200
        )
        job = JOB | {"structure": structure, "rows": 1000}
        for name, value in (("optimizer", "sgd"), ("precision", "fp64")):
            message = _refusal(
                reader.post("/estimates", json=request | {name: value}), 422, "bad_input"
            )
            assert f"the structure's {name}" in message
            given = {"name": value} if name == "optimizer" else value
            message = _refusal(
                reader.post("/plans", json=job | {"train": {name: given}}), 422, "bad_input"
            )
            assert f"the structure's {name}" in message


def test_a_structure_with_impossible_numbers_is_the_clients_error(
    address: str, structure: Any
) -> None:
    first = structure["trace"][0]
    negative = first | {"flops": {"fixed": -1e9, "per_sample": 0.0}}
    nowhere = structure["lifetimes"] | {"step": [-(10**9)]}
    with client(address, READ) as reader:
        for change in (
            {"precision": "int3"},
            {"batch_size": 0},
            {"parameter_bytes": -1},
            {"parameters": 10**40},
            {"trace": [negative]},
            {"lifetimes": nowhere},
        ):
            request = {
                "structure": structure | change,
                "batch_size": 64,
                "device_type": "nvidia-t4",
            }
            _refusal(reader.post("/estimates", json=request), 422, "bad_input")


def test_a_page_of_another_origin_is_refused(address: str) -> None:
    with client(address) as run:
        for origin in ("https://evil.example", "null", address + ".evil.example"):
            _refusal(run.post("/estimates", json={}, headers={"Origin": origin}), 403, "forbidden")
        _refusal(run.post("/estimates", json={}, headers={"Origin": address}), 422, "bad_input")


@pytest.mark.parametrize("chunked", [False, True])
def test_an_oversized_body_is_413_and_takes_no_memory(address: str, chunked: bool) -> None:
    (server,) = [one for one in psutil.Process().children() if "serve" in one.cmdline()]
    before = server.memory_info().rss
    part = b" " * 2**20
    content: Any = (part for _ in range(40)) if chunked else part * 40
    with client(address) as run:
        _refusal(run.post("/plans", content=content), 413, "too_large")
    assert server.memory_info().rss - before < 30 * 2**20


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 500,
        b'{"a": ' + b"[" * 50 + b"]" * 50 + b"}",
        b"\xff",
        b"[]",
        b"{",
        b'{"name": NaN}',
        b'{"name": 1e999}',
        b'{"a": 1, "a": 2}',
        b'{"name": "\\ud800"}',
    ],
)
def test_deep_or_malformed_bodies_are_422(address: str, body: bytes) -> None:
    with client(address) as run:
        _refusal(run.post("/plans", content=body), 422, "bad_input")


def test_a_model_that_ends_its_process_is_its_senders_error(address: str) -> None:
    with client(address) as run:
        request = {"model": model("import os; os._exit(3)")}
        message = _refusal(run.post("/structures", json=request), 422, "bad_input")
    assert message == "model: tracing model.py ended its process with exit code 3"


def test_requests_beyond_the_capacity_get_429_and_a_disconnected_client_frees_its_slot(
    address: str, structure: Any
) -> None:
    def sleepers() -> list[psutil.Process]:
        return [
            one for one in psutil.process_iter(["cmdline"]) if "98.5" in (one.info["cmdline"] or ())
        ]

    async def until(found: Callable[[], bool]) -> None:
        async with asyncio.timeout(40):  # shorter than a request's own time limit
            while not found():
                await asyncio.sleep(0.05)

    async def crowd() -> None:
        headers = {"Authorization": f"Bearer {RUN}"}
        async with httpx.AsyncClient(base_url=address, headers=headers, timeout=200) as run:
            code = "import subprocess\nsubprocess.Popen(['sleep', '98.5'])\n"
            requests = [{"model": model(f"# {number}\n{code}{SLEEPS}")} for number in range(3)]
            asked = [
                asyncio.ensure_future(run.post("/structures", json=request)) for request in requests
            ]
            # One runs, one waits, and the third, whichever that is, is refused.
            (refused,), left = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            _refusal(refused.result(), 429, "busy")
            assert int(refused.result().headers["Retry-After"]) >= 1
            assert (await run.get("/devices")).status_code == 200
            await until(lambda: bool(sleepers()))
            assert not any(one.done() for one in left)
            for one in left:
                one.cancel()
            await asyncio.wait(left)
        await until(lambda: not sleepers())

    asyncio.run(crowd())
    with client(address) as run:
        again = run.post("/structures", json={"model": model(CNN, width=4), "spec": SPEC})
        assert again.status_code == 200  # the only slot is free, because its process was ended
    assert not sleepers()


def test_a_request_can_not_take_longer_than_allowed(tmp_path: Path) -> None:
    with serving(tmp_path, "--timeout", "2", "--workers", "1") as address, client(address) as run:
        assert "within 2 s" in _refusal(
            run.post("/structures", json={"model": model(SLEEPS)}), 422, "bad_input"
        )
        server = max(psutil.Process().children(), key=lambda one: one.create_time())
        children = server.children(recursive=True)
        assert any("infra.sandbox.fork_server" in " ".join(one.cmdline()) for one in children)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive  # the fork servers end with the server


def test_clients_with_equal_requests_get_the_same_answer(address: str, structure: Any) -> None:
    request = {"structure": structure, "batch_size": 96, "device_type": "nvidia-a10"}
    answers: list[tuple[int, str]] = []

    def ask() -> None:
        with client(address, READ) as reader:
            answer = reader.post("/estimates", json=request)
            answers.append((answer.status_code, answer.text))

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 20
    assert {status for status, _ in answers} == {200}
    assert len({text for _, text in answers}) == 1


def test_pool_and_devices_equal_the_command_lines(address: str) -> None:
    with client(address, READ) as reader:
        pool = reader.get("/pool", params={"name": "two-cpus"}).json()
        assert [one["id"] for one in pool["devices"]] == ["here/cpu-0", "here/cpu-1"]
        _refusal(reader.get("/pool", params={"name": "../../README.md"}), 404, "not_found")
        says = _refusal(
            reader.get("/pool", params={"name": "../jobs/digits.yaml/"}), 422, "bad_input"
        )
        assert "is a job file; its pool is" in says
        assert "nvidia-t4" in [one["name"] for one in reader.get("/devices").json()["devices"]]


def test_an_unknown_query_field_is_refused_after_authentication(
    address: str,
) -> None:
    with client(address, READ) as reader:
        for path, query in (
            ("/pool", "nme=two-cpus"),
            ("/pool", "name=two-cpus&x="),
            ("/devices", "type=cpu"),
            ("/openapi.json", "a"),
        ):
            assert "unknown field of the query" in _refusal(
                reader.get(f"{path}?{query}"), 422, "bad_input"
            )
        assert "more than once" in _refusal(
            reader.get("/pool?name=a&name=two-cpus"), 422, "bad_input"
        )
        long = _refusal(reader.get("/pool", params={"name": "x" * 201}), 422, "bad_input")
        assert "at most 200 character(s)" in long
    _refusal(httpx.get(f"{address}/pool?nme=x", timeout=60), 401, "unauthorized")


def test_the_page_learns_which_layouts_a_job_may_name(address: str) -> None:
    with client(address, READ) as reader:
        names = reader.get("/pools").json()["layouts"]
    assert {"auto", "data-parallel", "mixed"} <= set(names)
    for name in names:
        assert TrainSpec.model_validate({"layout": name}).layout == name


def test_the_openapi_document_describes_the_requests_and_has_no_dangling_reference(
    address: str,
) -> None:
    with client(address, READ) as reader:
        document = reader.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/plans",
        "/estimates",
        "/structures",
        "/pool",
        "/pools",
        "/devices",
        "/runs",
        "/runs/{job}/{run_id}",
        "/runs/{job}/{run_id}/metrics",
        "/runs/{job}/{run_id}/structure",
        "/runs/{job}/{run_id}/timeline",
        "/runs/{job}/{run_id}/report",
        "/runs/{job}/{run_id}/rejection",
        "/runs/{job}/{run_id}/exports/{kind}/{file}",
        "/runs/{job}/{run_id}/tensorboard",
        "/history",
        "/recommendations",
    }
    named = {
        part.split('"')[0] for part in json.dumps(document).split('"#/components/schemas/')[1:]
    }
    assert named <= set(document["components"]["schemas"])
    for path in ("/plans", "/estimates", "/structures"):
        assert {"200", "401", "403", "413", "422", "429"} <= set(
            document["paths"][path]["post"]["responses"]
        )


def test_a_token_file_is_created_for_its_owner_only_and_reused(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "token"
    token = token_from(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert token_from(path) == token


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda path: (path.write_text("x" * 40), path.chmod(0o644)), "mode 600"),
        (lambda path: (path.write_text("short"), path.chmod(0o600)), "16 characters"),
        (lambda path: path.mkdir(mode=0o700), "token-file"),
    ],
)
def test_an_unusable_token_file_exits_with_2(tmp_path: Path, prepare: Any, expected: str) -> None:
    path = tmp_path / "token"
    prepare(path)
    command = [
        sys.executable,
        "-m",
        "trainwright.tasks.cli.main",
        "serve",
        "--port",
        "0",
        "--token-file",
        str(path),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert expected in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(("option", "value"), [("--workers", "0"), ("--timeout", "nan")])
def test_a_service_without_a_worker_or_a_limit_is_refused(option: str, value: str) -> None:
    command = [sys.executable, "-m", "trainwright.tasks.cli.main", "serve", option, value]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (refused.returncode, refused.stderr) == (
        2,
        f"trainwright: {option}: got {value}; allowed: 1 or more\n",
    )


def test_the_printed_address_opens_the_page(address: str) -> None:
    found = httpx.get(address, follow_redirects=True, timeout=60)
    assert found.status_code == 200
    assert str(found.url) == f"{address}/page/"


def test_answers_are_sent_without_delay() -> None:
    with listening("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
