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


GENERIC = {"Any", "Callable", "Mapping", "None", "Path", "Sequence", "Values"}
"""Names in annotations that are not values of the language."""


def items(name):
    """The items of a rule: name, type and marks of each."""
    text = re.sub(r"\s+", " ", RULES[name]).strip()
    return re.findall(r"(\w+)((?:\(.*?\)|\{.*?\}|[^,(){}])*)(?:,|$)", text)


@pytest.mark.parametrize("name", CLASSES)
def test_a_rule_has_the_fields_in_order(name):
    names = [field.name for field in fields(CLASSES[name]) if field.init]
    assert [item for item, _ in items(name)] == names


@pytest.mark.parametrize("name", CLASSES)
def test_a_rule_has_the_types_of_the_fields(name):
    """Values of the language by name; * for sequences, {} for mappings, ? for None."""
    rules = {item: kind for item, kind in items(name)}
    for field in fields(CLASSES[name]):
        if not field.init:
            continue
        rule, kind = rules[field.name], str(field.type).partition(" | None")
        marks = ("{" in rule) * "{}" + re.search(r"[*?]*$", rule)[0]
        is_many = re.search(r"Sequence|, \.\.\.\]$", kind[0])
        of_type = kind[0].startswith("Mapping") * "{}" + bool(is_many) * "*"
        assert marks == of_type + bool(kind[1]) * "?", f"{field.name}: {field.type}"
        values = {*re.findall(r"\b[A-Z]\w+", kind[0])} - GENERIC
        assert {*re.findall(r"\b[A-Z]\w+", rule)} == values, field.name


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ('dtype  "', tensor.DTYPES),
        ('lane   "', function.LANES),
        ('roles  "', function.ROLES),
        ("right: Expr)    +", expr.FUNCTIONS),
        ("right: Expr)    <", expr.COMPARISONS),
    ],
)
def test_words_of_the_language_are_complete(words, values):
    (line,) = (line for line in ir.__doc__.splitlines() if words in line)
    text = line[line.index(words) + len(words) - 1 :].replace('"', "")
    assert re.split(r" \| | ", text) == [*values]
