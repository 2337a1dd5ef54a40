"""The links of a task in Airflow's UI: its run, the plan, the report, TensorBoard.

They open the service that is mounted in Airflow's API server, behind its login. A run that is not
in the configured store has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar
from urllib.parse import quote

import attrs
from airflow.sdk import BaseOperatorLink
from airflow.sdk.configuration import conf

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

SERVICE = "/trainwright"


def service_address(path: str) -> str:
    """The address of a path of the service that is mounted in Airflow's API server."""
    base = str(conf.get("api", "base_url", fallback="") or "").rstrip("/")
    return f"{base}{SERVICE}/{path}"


@attrs.define()
class RunFolderLink(BaseOperatorLink):
    """The run on the page."""

    name = "Run folder"
    address: ClassVar[str] = "page/#/run/{run}"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The address; empty until the task knows its run."""
        shown: tuple[str, str] | None = getattr(operator, "shown_run", None)
        if shown is None:
            return ""
        return service_address(self.address.format(run="/".join(map(quote, shown))))


@attrs.define()
class PlanLink(RunFolderLink):
    """The plan: devices, batch, strategy, rejected alternatives with reasons."""

    name = "Plan"
    address = "page/#/run/{run}?part=plan"


@attrs.define()
class ReportLink(RunFolderLink):
    """The report of `analyze`."""

    name = "Report"
    address = "runs/{run}/report"


@attrs.define()
class TensorBoardLink(RunFolderLink):
    """TensorBoard: the configured one ([trainwright] tensorboard_url), else the service's."""

    name = "TensorBoard"
    address = "page/#/run/{run}?part=tensorboard"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The address; empty until the task knows its run."""
        return str(
            conf.get("trainwright", "tensorboard_url", fallback="")
        ) or RunFolderLink.get_link(self, operator, ti_key=ti_key)


@attrs.define()
class RejectionLink(RunFolderLink):
    """The page of rejected data, of a task that rejected it."""

    name = "Rejected data"
    address = "runs/{run}/rejection"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The address; empty unless the task rejected its run's data."""
        rejected = getattr(operator, "rejected", False)
        return RunFolderLink.get_link(self, operator, ti_key=ti_key) if rejected else ""


LINKS = (RunFolderLink(), PlanLink(), ReportLink(), TensorBoardLink())
