"""A generated file that was made for other columns is refused by their names."""

from __future__ import annotations

import re

import pytest
from network_case import Series
from table_case import HEADER, schema

from trainwright.tasks.errors import BadInput
from trainwright.tasks.generated_columns import require_generated_columns
from trainwright.tasks.recommend.templates import templates
from trainwright.tasks.runs.artefacts.data_schema import DataSchema

HOSTILE = ["label", "it's", 'a"b\\', "größe " * 30, "x", "y", "z"]


def source(data: DataSchema, template: str) -> str:
    found = templates()[template]
    return found.source(data, found.sizes["small"], HEADER)


def without(data: DataSchema, *names: str) -> DataSchema:
    kept = [one for one in data.columns if one.name not in names]
    return data.model_copy(update={"columns": kept})


@pytest.mark.parametrize("template", ["linear", "realmlp", "tabm", "wide"])
def test_a_table_with_other_columns_is_refused_with_both_lists(template: str) -> None:
    for names in (None, HOSTILE):
        data = schema(3, 3, False, 2, names)
        made = source(data, template)
        require_generated_columns(made, "model.py", data)
        number, category = data.columns[0].name, data.columns[-1].name
        for lost, kind in ((number, "numbers"), (category, "texts")):
            says = f"model.source: model.py was made for the columns of {kind} "
            with pytest.raises(BadInput, match=re.escape(says)) as raised:
                require_generated_columns(made, "model.py", without(data, lost))
            assert "; the data has " in str(raised.value)
            assert "\n" not in str(raised.value)
        turned = data.model_copy(update={"columns": data.columns[::-1]})
        with pytest.raises(BadInput, match="in this order"):
            require_generated_columns(made, "model.py", turned)


def test_series_with_other_known_columns_are_refused() -> None:
    made = source(Series(known=1, named=True).schema(), "dlinear")
    require_generated_columns(made, "model.py", Series(known=1, named=True).schema())
    with pytest.raises(BadInput, match=r"the columns of numbers price; the data has price, promo"):
        require_generated_columns(made, "model.py", Series(known=2, named=True).schema())
    none = source(Series().schema(), "dlinear")
    require_generated_columns(none, "model.py", Series().schema())
    with pytest.raises(BadInput, match=r"numbers \(none\); the data has price"):
        require_generated_columns(none, "model.py", Series(known=1).schema())


def test_other_files_pass_and_so_do_lists_that_are_made() -> None:
    data = schema(3, 0, False, 2)
    made = source(data, "linear")
    other = without(data, data.columns[0].name)
    require_generated_columns(made.replace("Digest: ", "Made of "), "model.py", other)
    require_generated_columns("x = (", "model.py", other)
    computed = re.sub(r"(NUMBERS: list\[str\] = ).*", r"\1list('abc')", made)
    require_generated_columns(computed, "model.py", other)
