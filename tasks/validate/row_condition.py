"""The row conditions that an expectation may have.

Great Expectations gives them to `DataFrame.query` of pandas, which evaluates Python: a call or an
attribute could run any code, and suites are also read from the store. So only comparisons of
columns with values are allowed, and tests for missing values.
"""

from __future__ import annotations

import ast
import re

_NAME = re.compile(r"""`[^`"'@]*`|\bcol\((["'])[^`"'@()]*\1\)""")
"""A column's name in backticks or as `col("name")`; without quotes, so that texts stay texts."""
_UNUSUAL = re.compile(r"[#\\\r\n]")
"""What this and pandas might read differently."""
_TESTS = ("isna", "notna", "isnull", "notnull", "isNull", "notNull")
_ALLOWED = (
    ast.Expression,
    ast.BoolOp,
    ast.BinOp,
    ast.UnaryOp,
    ast.Compare,
    ast.Name,
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.boolop,
    ast.operator,
    ast.unaryop,
    ast.cmpop,
    ast.expr_context,
)


def is_plain_condition(condition: object) -> bool:
    """Whether a condition, such as `age > 3 and town == "Rome"`, is allowed."""
    if not isinstance(condition, str) or _UNUSUAL.search(condition):
        return False
    try:
        tree = ast.parse(_NAME.sub("name", condition).strip(), mode="eval")
        return _is_plain(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _is_plain(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        tested = node.func
        return (
            not (node.args or node.keywords)
            and isinstance(tested, ast.Attribute)
            and tested.attr in _TESTS
            and isinstance(tested.value, ast.Name)
        )
    return isinstance(node, _ALLOWED) and all(map(_is_plain, ast.iter_child_nodes(node)))
