"""The REST service behind Airflow's login.

A user who may trigger the DAG `retrain` has the right `run`; a user who may see it has the right
`read`.
"""

from typing import Annotated, Any

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.api_fastapi.core_api.security import get_user
from fastapi import Depends, FastAPI

from trainwright.infra.process import hide
from trainwright.operators.hooks import connection_ids, settings_of
from trainwright.tasks.errors import Forbidden
from trainwright.tasks.service.app import create_app
from trainwright.tasks.service.auth import Client
from trainwright.tasks.service.service import Service

_DAG = DagDetails(id="retrain")


def airflow_client(user: Annotated[Any, Depends(get_user)]) -> Client:
    """Airflow's user as a client of the service.

    Raises Airflow's 401 without a login, Forbidden if the user may not see the DAG.
    """
    manager = get_auth_manager()
    if manager.is_authorized_dag(
        method="POST", access_entity=DagAccessEntity.RUN, details=_DAG, user=user
    ):
        return Client("run")
    if manager.is_authorized_dag(method="GET", details=_DAG, user=user):
        return Client("read")
    raise Forbidden("this needs the right to see the DAG retrain")


def mounted_app() -> FastAPI:
    """The application to mount, with Airflow's configuration and connections.

    Its fork servers start at the first request that needs them, and end with the server.
    """
    hide()  # users' model code runs as the same OS user
    service = Service(settings_of(connection_ids()))
    return create_app(service, airflow_client, start=False, login="airflow")
