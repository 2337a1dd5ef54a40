"""Families of models, each a pure function from a data schema to source code.

`template` says what a template is, `table_parts` has what all of them for tables share; every other
module here is one family of models for tables. `texts_images` and `forecasts` have the others.
"""

from __future__ import annotations

from trainwright.tasks.recommend.templates.forecasts.dlinear import DLINEAR
from trainwright.tasks.recommend.templates.forecasts.nhits import NHITS
from trainwright.tasks.recommend.templates.linear_table import LINEAR
from trainwright.tasks.recommend.templates.realmlp_table import REALMLP
from trainwright.tasks.recommend.templates.tabm_table import TABM
from trainwright.tasks.recommend.templates.template import Template
from trainwright.tasks.recommend.templates.texts_images.depthwise_network import DEPTHWISE_NETWORK
from trainwright.tasks.recommend.templates.texts_images.ngram_bag import NGRAM_BAG
from trainwright.tasks.recommend.templates.texts_images.residual_network import RESIDUAL_NETWORK
from trainwright.tasks.recommend.templates.texts_images.text_convolution import TEXT_CONVOLUTION
from trainwright.tasks.recommend.templates.wide_table import WIDE

_ALL = (
    LINEAR,
    REALMLP,
    TABM,
    WIDE,
    TEXT_CONVOLUTION,
    NGRAM_BAG,
    DEPTHWISE_NETWORK,
    RESIDUAL_NETWORK,
    DLINEAR,
    NHITS,
)


def templates() -> dict[str, Template]:
    """All templates by name; of a task, the one to take if nothing else is known comes last."""
    return {template.name: template for template in _ALL}
