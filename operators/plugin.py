"""The Airflow plugin: mounts the REST service at /trainwright, the runs' files at /trainwright-files, behind Airflow's login.

Every Airflow process imports this module; the service itself is imported at the first request.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, ClassVar

from airflow.plugins_manager import AirflowPlugin

Message = MutableMapping[str, Any]


class Mounted:
    """An ASGI application that is made, by the function of that name, when it is first called."""

    def __init__(self, module: str, function: str) -> None:
        self._module, self._function = module, function
        self._app: Any = None

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Pass a request on."""
        if self._app is None:
            self._app = getattr(importlib.import_module(self._module), self._function)()
        await self._app(scope, receive, send)


class TrainwrightPlugin(AirflowPlugin):
    """What Airflow gets from trainwright besides operators."""

    name = "trainwright"
    fastapi_apps: ClassVar[list[dict[str, Any]]] = [
        {
            "app": Mounted("trainwright.operators.service", "mounted_app"),
            "url_prefix": "/trainwright",
            "name": "trainwright",
        },
        {
            "app": Mounted("trainwright.operators.files", "create_files_app"),
            "url_prefix": "/trainwright-files",
            "name": "trainwright files",
        },
    ]
