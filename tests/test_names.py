"""Names of the package that a reader could confuse."""

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "etc_dist"
OF_TORCH = ["MLP", "MoE"]
"""Layers that are modules of torch, too, as users expect."""


def test_no_two_classes_share_a_name():
    texts = [path.read_text() for path in PACKAGE.rglob("*.py")]
    classes = [
        node.name
        for text in texts
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef)
    ]
    shared = sorted(name for name, count in Counter(classes).items() if count > 1)
    assert shared == OF_TORCH
