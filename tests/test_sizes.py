"""Sizes of functions of the package."""

import ast
from collections.abc import Iterator

from tests.sources import PACKAGE, nodes_of, tree_of

MOST_LINES = 60
"""Of a function's body, without its parameters and its docstring."""


def long_functions(module: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, lines) of functions with more than MOST_LINES."""
    for node in nodes_of(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            has_docstring = ast.get_docstring(node) is not None
            statements = node.body[has_docstring:] or node.body
            lines = statements[-1].end_lineno - statements[0].lineno + 1
            if lines > MOST_LINES:
                yield node.name, lines


def test_functions_have_at_most_60_lines():
    faults = {
        (path.relative_to(PACKAGE).as_posix(), name): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, lines in long_functions(tree_of(path))
    }
    assert not faults


def test_parameters_and_a_docstring_do_not_count():
    text = 'def f(\n    a,\n):\n    """A.\n    B."""\n' + "    a = 1\n" * 61
    module = ast.parse(text + "def g(\n    a,\n):\n" + "    a = 1\n" * 60)
    assert [*long_functions(module)] == [("f", 61)]
