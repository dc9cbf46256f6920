"""The grammar in `etc_dist.ir` names each value of the language, and its fields."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass

import pytest

from etc_dist import ir
from etc_dist.ir import call, event, expr, function, graph, operand, tensor

RULES = dict(re.findall(r"\b([A-Z]\w+)\(((?:[^()]|\(.*?\))*)\)", ir.__doc__))
SUGAR = {"Tile", "RemoteTensor", "RemoteEvents", "UpTo", "Expr"}
"""What a user writes in place of regions, elements and extents; the base class."""
CLASSES = {
    name: value
    for module in (call, event, expr, function, graph, operand, tensor)
    for name, value in vars(module).items()
    if isinstance(value, type) and is_dataclass(value) and name not in SUGAR
}


def test_each_value_has_a_rule():
    assert RULES.keys() == CLASSES.keys()


@pytest.mark.parametrize("name", CLASSES)
def test_a_rule_has_the_fields_in_order(name):
    plain = re.sub(r"\(.*?\)|\{.*?\}", "", RULES[name])
    named = re.findall(r"(\w+)[*?]*(?::[^,]*)?(?:,|$)", plain.strip())
    assert named == [field.name for field in fields(CLASSES[name]) if field.init]
