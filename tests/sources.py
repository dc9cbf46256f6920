"""The package's modules, which several tests read."""

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "etc_dist"


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file, parsed once a process."""
    return ast.parse(path.read_text())
