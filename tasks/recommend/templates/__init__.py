"""Families of models, each a pure function from a data schema to source code.

`template` says what a template is, `table_parts` has what all of them for tables share; every other
module is one family.
"""

from __future__ import annotations

from trainwright.tasks.recommend.templates.linear_table import LINEAR
from trainwright.tasks.recommend.templates.template import Template


def templates() -> dict[str, Template]:
    """All templates by name, the simplest first."""
    return {template.name: template for template in (LINEAR,)}
