"""The Airflow plugin: the REST service at /trainwright, behind Airflow's login, and its page.

The page is in the navigation and a tab of DAGs, DAG runs and tasks. Every Airflow process imports
this module; the service itself is imported at the first request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, ClassVar

from airflow.plugins_manager import AirflowPlugin

AsgiMessage = MutableMapping[str, Any]


class MountedService:
    """An ASGI application that loads the service at the first request."""

    def __init__(self) -> None:
        self._app: Any = None

    async def __call__(
        self,
        scope: AsgiMessage,
        receive: Callable[[], Awaitable[AsgiMessage]],
        send: Callable[[AsgiMessage], Awaitable[None]],
    ) -> None:
        """Pass a request to the service."""
        if self._app is None:
            from trainwright.operators.service import mounted_app

            self._app = mounted_app()
        await self._app(scope, receive, send)


_PAGE = "trainwright/page/"  # relative: Airflow may be served below a path


def _view(destination: str, screen: str) -> dict[str, Any]:
    return {
        "name": "trainwright",
        "destination": destination,
        "url_route": f"trainwright-{destination.replace('_', '-')}",
        "href": f"{_PAGE}?screen={screen}",
        "nav_top_level": destination == "nav",
        "icon": f"/{_PAGE}icon.svg",
        "icon_dark_mode": f"/{_PAGE}icon-dark.svg",
    }


class TrainwrightPlugin(AirflowPlugin):
    """The service, the page, and the preloading of modules."""

    name = "trainwright"

    @classmethod
    def on_load(cls, *_: Any, **__: Any) -> None:
        """Preload modules. Airflow calls this in every process that loads plugins."""
        from trainwright.operators.preload import preload

        preload()

    fastapi_apps: ClassVar[list[dict[str, Any]]] = [
        {"app": MountedService(), "url_prefix": "/trainwright", "name": "trainwright"}
    ]
    external_views: ClassVar[list[dict[str, Any]]] = [
        _view("nav", "pool"),
        _view("dag", "runs&dag={DAG_ID}"),
        _view("dag_run", "airflow&dag={DAG_ID}&run={RUN_ID}"),
        _view("task_instance", "airflow&dag={DAG_ID}&run={RUN_ID}&task={TASK_ID}"),
    ]
