"""The buttons on a task in Airflow's UI: the run's folder, its plan, its report, its TensorBoard events.

They lead to `operators.files`, which shows the runs of the configured store behind Airflow's login; a run elsewhere has none.
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

FILES = "/trainwright-files"


@attrs.define()
class RunFolderLink(BaseOperatorLink):
    """The run's folder."""

    name = "Run folder"
    path: ClassVar[str] = ""

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The address, once the task knows its run; else none."""
        shown: tuple[str, str] | None = getattr(operator, "shown_run", None)
        return "" if shown is None else link_to(shown[0], shown[1], self.path)


@attrs.define()
class PlanLink(RunFolderLink):
    """The plan: devices, batch, strategy, what lost and why."""

    name = "Plan"
    path = "plan.json"


@attrs.define()
class ReportLink(RunFolderLink):
    """The report of `analyze`."""

    name = "Report"
    path = "report/report.html"


@attrs.define()
class TensorBoardLink(RunFolderLink):
    """TensorBoard where the configuration names one ([trainwright] tensorboard_url), else the event files."""

    name = "TensorBoard"
    path = "events/"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The address, once the task knows its run; else none."""
        return str(conf.get("trainwright", "tensorboard_url", fallback="")) or RunFolderLink.get_link(
            self, operator, ti_key=ti_key
        )


LINKS = (RunFolderLink(), PlanLink(), ReportLink(), TensorBoardLink())


def link_to(job_name: str, run_id: str, path: str) -> str:
    """Where the browser finds a file of a run of the configured store."""
    base = str(conf.get("api", "base_url", fallback="") or "").rstrip("/")
    return f"{base}{FILES}/{quote(job_name)}/{quote(run_id)}/{quote(path)}"
