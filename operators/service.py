"""The REST service behind Airflow's login.

Users who may trigger the DAG `retrain` may start runs; those who may see it may read.
"""

from typing import Annotated, Any

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.api_fastapi.core_api.security import get_user
from fastapi import Depends, FastAPI

from trainwright.infra.process import allow_inspection
from trainwright.operators.hooks import connection_ids, settings_of
from trainwright.tasks.errors import Forbidden
from trainwright.tasks.service.app import create_app
from trainwright.tasks.service.auth import Caller
from trainwright.tasks.service.service import Service

_DAG = DagDetails(id="retrain")


def airflow_caller(user: Annotated[Any, Depends(get_user)]) -> Caller:
    """Airflow's user as a caller. Without a user, Airflow answers 401.

    Raises Forbidden if they may not see the DAG.
    """
    manager = get_auth_manager()
    if manager.is_authorized_dag(
        method="POST", access_entity=DagAccessEntity.RUN, details=_DAG, user=user
    ):
        return Caller("run")
    if manager.is_authorized_dag(method="GET", details=_DAG, user=user):
        return Caller("read")
    raise Forbidden("this needs the right to see the DAG retrain")


def mounted_app() -> FastAPI:
    """The application to mount, with Airflow's configuration and connections.

    Its processes start with the first request that needs them, and end with the server.
    """
    allow_inspection(False)  # without namespaces, models' code sees this process
    service = Service(settings_of(connection_ids()))
    return create_app(service, airflow_caller, start=False, login="airflow")
