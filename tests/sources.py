"""The package's modules, which several tests read."""

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "etc_dist"


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file, parsed once a process."""
    return ast.parse(path.read_text())


@cache
def nodes_of(node: ast.AST) -> tuple[ast.AST, ...]:
    """What `ast.walk` gives, in less time, which is most of that of these tests."""
    nodes = [node]
    for parent in nodes:
        for name in parent._fields:
            child = getattr(parent, name, None)
            if isinstance(child, ast.AST):
                nodes.append(child)
            elif isinstance(child, list):
                nodes += [part for part in child if isinstance(part, ast.AST)]
    return tuple(nodes)
