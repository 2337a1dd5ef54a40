"""The Airflow plugin: mounts the REST service in Airflow's API server at /trainwright, behind Airflow's login.

Every Airflow process imports this module; the service itself is imported at the first request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, ClassVar

from airflow.plugins_manager import AirflowPlugin

Message = MutableMapping[str, Any]


class MountedService:
    """An ASGI application that becomes the service when it is first called."""

    def __init__(self) -> None:
        self._app: Any = None

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Pass a request on."""
        if self._app is None:
            from trainwright.operators.service import mounted_app

            self._app = mounted_app()
        await self._app(scope, receive, send)


class TrainwrightPlugin(AirflowPlugin):
    """What Airflow gets from trainwright besides operators."""

    name = "trainwright"
    fastapi_apps: ClassVar[list[dict[str, Any]]] = [
        {"app": MountedService(), "url_prefix": "/trainwright", "name": "trainwright"}
    ]
