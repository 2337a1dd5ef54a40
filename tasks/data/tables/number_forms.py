"""Numbers as people write them in .csv files: 1.234,5 and 1'234.5, 12 % and $5.

Arrow reads numbers with a decimal point only; other columns come as texts. The form of such a
column is the one by which all of its texts are numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from trainwright.tasks.runs.artefacts.data_schema import NumberForm
from trainwright.tasks.spec.csv_spec import CsvSpec

_CLASSES = {" ": "[ \u00a0\u2009\u202f]", "'": "['\u2019]", ".": r"\.", ",": ","}
_SIGNS = "[€$£¥%]|EUR|USD|GBP|CHF|JPY"
_AFFIX = re.compile(rf"^[-+]?\s*({_SIGNS})\s*[-+\d.,]|\d\s*({_SIGNS})$")
_MARKS = [
    (".", ""), (",", ""), (".", ","), (",", "."), (",", " "), (".", " "), (".", "'"), (",", "'"),
]  # fmt: skip
"""decimal mark and that of thousands, the plainest first"""
_FIRST = 1_000


def number_forms(
    columns: Mapping[str, Any], spec: CsvSpec, known: Iterable[str] = ()
) -> dict[str, NumberForm]:
    """The forms of those columns of different texts, without missing ones, that hold numbers.

    `known`: the decimal marks of the file's other columns. A column that could be read in two ways
    is read by the mark that the job names, or that all other columns have. Raises ValueError if
    there is none.
    """
    possible = {name: forms for name, texts in columns.items() if (forms := _forms(texts, spec))}
    marks = set(known)
    for forms in possible.values():
        marks |= decimals if len(decimals := {form.decimal for form in forms}) == 1 else set()
    chosen = {}
    for name, forms in possible.items():
        told = [form for form in forms if {form.decimal} == marks]
        if _unclear(forms) and not told:
            mark = forms[0].decimal if forms[0].thousands == "" else forms[0].thousands
            raise ValueError(
                f"the column {name!r} holds numbers such as {_example(columns[name])!r}, whose "
                f"{mark} may be that of decimals or of thousands; data.csv.decimal: '{mark}' or "
                f"data.csv.thousands: '{mark}' says which"
            )
        chosen[name] = (told or forms)[0]
    return chosen


def _forms(texts: Any, spec: CsvSpec) -> list[NumberForm]:
    """The forms by which all texts are numbers and that the job permits, the plainest first."""
    first = texts.slice(0, _FIRST).to_pylist()
    if not first or not any(letter.isdigit() for letter in first[0]):
        return []
    found = next((match for text in first if (match := _AFFIX.search(text))), None)
    affix = (found[1] or found[2]) if found else ""
    forms = [
        NumberForm(decimal=mark, thousands=thousands, affix=affix) for mark, thousands in _MARKS
    ]
    for part in (texts.slice(0, _FIRST), texts):  # most texts are told by the first ones
        forms = [form for form in forms if _all_match(part, form)]
    wanted = [
        form
        for form in forms
        if (spec.decimal in (None, form.decimal))
        and (spec.thousands is None or form.thousands in ("", spec.thousands))
        and spec.thousands != form.decimal
    ]
    return wanted or forms


def _unclear(forms: list[NumberForm]) -> bool:
    """Whether a mark may be that of decimals or of thousands: 1,234 rather than 1,5 or 12."""
    plain = {form.decimal for form in forms if not form.thousands}
    return len(plain) == 1 and any(form.thousands in plain for form in forms)


def _example(texts: Any) -> str:
    from pyarrow import compute

    marked = texts.filter(compute.match_substring_regex(texts, r"[.,]"))
    return str((marked if len(marked) else texts)[0].as_py())[:40]


def _body(form: NumberForm) -> str:
    """The regular expression of a form's numbers, without sign and affix."""
    mark = _CLASSES[form.decimal]
    plain = rf"\d+(?:{mark}\d*)?|{mark}\d+"
    if not form.thousands:
        return rf"(?:{plain})(?:[eE][-+]?\d+)?"
    grouped = rf"[1-9]\d{{0,2}}(?:{_CLASSES[form.thousands]}\d{{3}})+(?:{mark}\d*)?"
    return rf"(?:{grouped}|{plain})"


def _pattern(form: NumberForm) -> str:
    return rf"^[-+]?{_body(form)}$"


_BODIES = "|".join(
    _body(NumberForm(decimal=mark, thousands=thousands)) for mark, thousands in _MARKS
)
ANY_NUMBER = rf"^\s*[-+]?\s*(?:{_SIGNS})?\s*[-+]?(?:{_BODIES})\s*(?:{_SIGNS})?\s*$"
"""the regular expression of a number in any form"""


def _bare(texts: Any, form: NumberForm) -> Any:
    """The texts without white space and affix around them."""
    from pyarrow import compute

    texts = compute.replace_substring(compute.utf8_trim_whitespace(texts), "\u2212", "-")
    if form.affix:
        affix = re.escape(form.affix)
        texts = compute.replace_substring_regex(texts, rf"^([-+]?)\s*{affix}\s*", r"\1")
        texts = compute.replace_substring_regex(texts, rf"\s*{affix}$", "")
    return texts


def _all_match(texts: Any, form: NumberForm) -> bool:
    from pyarrow import compute

    return bool(
        compute.all(compute.match_substring_regex(_bare(texts, form), _pattern(form))).as_py()
    )


def as_numbers(texts: Any, form: NumberForm, name: str) -> Any:
    """A column of texts as float64. Raises ValueError for one that is no number of this form."""
    import pyarrow as pa
    from pyarrow import compute

    bare = _bare(texts, form)
    fits = compute.match_substring_regex(bare, _pattern(form))
    if compute.all(fits).as_py() is False:
        wrong = texts[compute.index(fits, False).as_py()]
        raise ValueError(
            f"the column {name!r} holds {wrong.as_py()[:40]!r}; its other numbers are written as "
            f"{shown(form)}; allowed: one way"
        )
    if form.thousands:
        bare = compute.replace_substring_regex(bare, _CLASSES[form.thousands], "")
    if form.decimal != ".":
        bare = compute.replace_substring(bare, form.decimal, ".")
    return bare.cast(pa.float64())


def shown(form: NumberForm) -> str:
    """An example of a form, as in 1.234,5 %."""
    number = f"1{form.thousands}234{form.decimal}5"
    return f"{number} {form.affix}" if form.affix else number
