"""The generated part of the manual: pages of `reference/`, pictures; by their path below docs/.

    python docs/generator/reference.py FOLDER      writes them to a folder, to look at

`make docs` calls `pages` while it builds the site; none of them is kept in the tree.
"""

from __future__ import annotations

import sys
from pathlib import Path

import airflow_pages
import command_pages
import figures
import model_pages
import operator_pages
import rest_pages
import setting_pages


def pages() -> dict[str, str]:
    """The content of each file by its path."""
    schema = rest_pages.document()
    return {
        "reference/commands.md": command_pages.commands(),
        "reference/job.md": model_pages.job(),
        "reference/pool.md": model_pages.pool(),
        "reference/artefacts.md": model_pages.artefacts(),
        "reference/operators.md": operator_pages.operator_page(),
        "reference/airflow.md": airflow_pages.airflow_page(),
        "reference/rest.md": rest_pages.rest(schema),
        "reference/openapi.json": rest_pages.openapi_text(schema),
        "reference/settings.md": setting_pages.setting_page(),
        "reference/exit-codes.md": setting_pages.exit_codes(),
        "explanation/schedules.svg": figures.schedules(),
        "explanation/water-filling.svg": figures.water_filling(),
    }


if __name__ == "__main__":
    for name, content in pages().items():
        file = Path(sys.argv[1]) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
