"""A client of a running Airflow's REST API, logged in as its admin."""

from __future__ import annotations

import json
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from trainwright.infra.airflow import USER, airflow_address, password_file

ENDED = ("success", "failed")
Found = TypeVar("Found")


class AirflowClient:
    """Calls the REST API of a home's Airflow. A DAG run is identified by its path."""

    def __init__(self, home: Path) -> None:
        self.base, self._token = airflow_address(home), ""
        self.password = json.loads(password_file(home).read_text())[USER]
        self._token = self("POST", "/auth/token", {"username": USER, "password": self.password})[
            "access_token"
        ]

    def __call__(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer's JSON. Raises urllib.error.HTTPError."""
        return json.loads(self._fetch(method, self.base + path, body))

    def page(self, address: str) -> str:
        """The content at an address of this Airflow. Raises urllib.error.HTTPError."""
        return self._fetch("GET", address, None)

    def _fetch(self, method: str, address: str, body: Mapping[str, Any] | None) -> str:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(address, data=data, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=300) as response:
            return str(response.read().decode())

    def has_dag(self, dag: str = "retrain") -> bool:
        """Whether the DAG's file has been read."""
        return any(one["dag_id"] == dag for one in self("GET", "/api/v2/dags?limit=100")["dags"])

    def start(self, dag: str = "retrain", **conf: object) -> str:
        """Trigger a DAG; the path of the DAG run."""
        run = self("POST", f"/api/v2/dags/{dag}/dagRuns", {"conf": conf, "logical_date": None})
        return f"/api/v2/dags/{dag}/dagRuns/{urllib.parse.quote(run['dag_run_id'])}"

    def ended(self, where: str, seconds: float = 900) -> str:
        """Wait for a DAG run to end; its final state."""
        return until(
            f"{where} ended",
            lambda: (state := str(self("GET", where)["state"])) in ENDED and state,
            seconds,
            lambda: str(self.states(where)),
        )

    def instances(self, where: str) -> list[dict[str, Any]]:
        """The task instances of a DAG run."""
        found: list[dict[str, Any]] = self("GET", f"{where}/taskInstances?limit=100")[
            "task_instances"
        ]
        return found

    def states(self, where: str) -> dict[str, str | None]:
        """The state of each task of a DAG run."""
        return {one["task_id"]: one["state"] for one in self.instances(where)}

    def state(self, where: str, task: str) -> str | None:
        """The state of a task of a DAG run."""
        found: str | None = self("GET", f"{where}/taskInstances/{task}")["state"]
        return found

    def reached(self, where: str, task: str, state: str) -> None:
        """Wait for a task to reach a state while its DAG run continues."""

        def there() -> bool:
            assert self("GET", where)["state"] not in ENDED, self.states(where)
            return self.state(where, task) == state

        until(f"{task} is {state}", there, tell=lambda: str(self.states(where)))

    def xcom(self, where: str, task: str, key: str = "return_value") -> Any:
        """A task's XCom."""
        return self("GET", f"{where}/taskInstances/{task}/xcomEntries/{key}?deserialize=false")[
            "value"
        ]

    def links(self, where: str, task: str) -> dict[str, str | None]:
        """The extra links of a task of a DAG run."""
        found: dict[str, str | None] = self("GET", f"{where}/taskInstances/{task}/links")[
            "extra_links"
        ]
        return found

    def events(self, uri: str) -> list[dict[str, Any]]:
        """The newest events of an Asset, even if no DAG names it."""
        found = self("GET", "/api/v2/assets/events?limit=100&order_by=-timestamp")["asset_events"]
        return [event for event in found if event["uri"] == uri]

    def log(self, where: str, task: str, attempt: int = 1) -> str:
        """A task's log, as the API server shows it."""
        return json.dumps(
            self("GET", f"{where}/taskInstances/{task}/logs/{attempt}?full_content=true")["content"]
        )

    def set_state(self, where: str, task: str, state: str) -> None:
        """Mark a task, as the UI's button does."""
        self("PATCH", f"{where}/taskInstances/{task}", {"new_state": state})

    def clear(self, where: str, task: str) -> None:
        """Clear a task and its downstream tasks, as the UI's button does."""
        dag, run = where.removeprefix("/api/v2/dags/").split("/dagRuns/")
        asked = {
            "dag_run_id": urllib.parse.unquote(run),
            "task_ids": [task],
            "include_downstream": True,
        }
        self(
            "POST",
            f"/api/v2/dags/{dag}/clearTaskInstances",
            {**asked, "dry_run": False, "only_failed": False},
        )


def until(
    what: str,
    test: Callable[[], Found | bool | None],
    seconds: float = 600,
    tell: Callable[[], str] = lambda: "",
) -> Found:
    """Wait for a value and return it. On a timeout, the message ends with the result of `tell`."""
    deadline = time.monotonic() + seconds
    while not (found := test()):
        assert time.monotonic() < deadline, f"not in {seconds:g} s: {what} {tell()}"
        time.sleep(0.5)
    return found  # type: ignore[return-value]
