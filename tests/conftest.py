"""What all tests share: no test sees or touches the user's own trainwright, and no process is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import lab  # noqa: F401 - a fixture

from trainwright.infra.airflow import airflow_services, training_service
from trainwright.infra.s3 import S3Access, s3_service, start_s3
from trainwright.infra.service import stop
from trainwright.tasks import step


def _end(home: Path) -> None:
    stop([s3_service(home), *airflow_services(home), training_service(home)], grace_s=0)


@pytest.fixture(scope="session", autouse=True)
def _apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The session's own home; variables that would lead elsewhere are taken away."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("TRAINWRIGHT_", "AIRFLOW_"))]:
            patch.delenv(name)
        patch.setenv("TRAINWRIGHT_HOME", str(folder))
        yield folder
    _end(folder)


@pytest.fixture(autouse=True)
def _nobody_in_particular(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test holds things in the name that another one acted as."""
    monkeypatch.setattr(step, "_me", None)
    monkeypatch.setattr(step, "_right", None)


@pytest.fixture(scope="session")
def _server(_apart: Path) -> S3Access:
    return start_s3(_apart)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty trainwright home of the test's own."""
    folder = tmp_path / "home"
    monkeypatch.setenv("TRAINWRIGHT_HOME", str(folder))
    yield folder
    _end(folder)


@pytest.fixture
def s3(_server: S3Access, monkeypatch: pytest.MonkeyPatch) -> S3Access:
    """The session's S3 server, to which the environment leads, whatever the home is."""
    monkeypatch.setenv("TRAINWRIGHT_S3_ENDPOINT", _server.endpoint)
    monkeypatch.setenv("TRAINWRIGHT_S3_ACCESS_KEY", _server.access_key)
    monkeypatch.setenv("TRAINWRIGHT_S3_SECRET_KEY", _server.secret_key)
    return _server


@pytest.fixture
def stack(_apart: Path, _server: S3Access) -> Path:
    """The session's home, its S3 server running: what one test stores and measures there, the next finds."""
    return _apart
