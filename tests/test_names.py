"""Names of the package that a reader could confuse."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PARTICIPLES = """added arrived asked awaited begun cached changed chosen claimed counted
done ended found gathered given got held included joined kept known left listed loaded
lost made merged met named needed notified ordered planned reached received refused
required returned said seen sent served shown skipped started stored supposed taken
unknown used wanted written"""
PRONOUNS = "both each it mine one other others own rest that them these this those"
WORDS = {*PARTICIPLES.split(), *PRONOUNS.split()}
"""These alone do not say what a value is: a noun does, as in `kept_pages`."""
FOLDERS = {
    *(
        "codegen",
        "emulate",
        "ir",
        "models",
        "port",
        "predict",
        "runtime",
        "schedule",
        "serve",
    ),
    *("torch", "verify", "world"),
}
"""Where no local value is named by such a word, nor in the modules beside them."""
EXCEPTIONS = {
    ("ir/tensor.py", "other"): "a keyword argument of a public method",
    ("errors.py", "got"): "what all errors have",
    ("errors.py", "wanted"): "what all errors have",
    ("models/pages.py", "given"): "a keyword argument of a public method",
    ("port/faults.py", "got"): "the field of an error, of which one is made here",
    ("port/faults.py", "wanted"): "the field of an error, of which one is made here",
    (
        "runtime/array_checks.py",
        "wanted",
    ): "the field of an error, in a pair with `got`",
    ("world/world.py", "chosen"): "a keyword argument of a public method",
}

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


def is_field(node: ast.AST) -> bool:
    return isinstance(node, (ast.Assign, ast.AnnAssign))


def bound_names(node: ast.AST) -> Iterator[str]:
    """The names that are bound in `node`, but for fields of classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        elif isinstance(child, ast.arg):
            yield child.arg
        elif isinstance(child, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
            yield from [child.name] if child.name else []
        if isinstance(child, ast.ClassDef):
            for part in child.body:
                if not is_field(part):
                    yield from bound_names(part)
        else:
            yield from bound_names(child)


def functions_of(node: ast.AST) -> Iterator[ast.AST]:
    """The outermost functions in `node`, and what is in none of them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from functions_of(child)
        elif not (isinstance(node, ast.ClassDef) and is_field(child)):
            yield child


def fields_of_errors(function: ast.AST) -> set[str]:
    """Those of `wanted` and `got` that `function` gives to an error."""
    values: list[ast.AST] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Raise):
            values.append(node)
        elif isinstance(node, ast.keyword) and node.arg in ("wanted", "got"):
            values.append(node.value)
    names = {n.id for v in values for n in ast.walk(v) if isinstance(n, ast.Name)}
    return names & {"wanted", "got"}


def bare_words(function: ast.AST) -> list[str]:
    """The words of WORDS that name a local value or a parameter of `function`."""
    name = getattr(function, "name", "")
    names = [*bound_names(ast.Module([function], []))]  # type: ignore[list-item]
    allowed = fields_of_errors(function)
    if "right" in names:
        allowed.add("left")  # the sides of an operator
    if name.startswith("__") and name != "__init__":
        allowed.add("other")  # as in Python's data model
    return [n for n in names if n.strip("_") in WORDS - allowed]


def test_local_values_are_named_by_nouns():
    faults, unused = [], {*EXCEPTIONS}
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE)
        if len(file.parts) == 1 or file.parts[0] in FOLDERS:
            for function in functions_of(ast.parse(path.read_text())):
                where = f"{file}:{getattr(function, 'lineno', 0)}"
                words = bare_words(function)
                unused -= {(str(file), word) for word in words}
                faults += [
                    f"{where} {word}"
                    for word in words
                    if (str(file), word) not in EXCEPTIONS
                ]
    assert not faults, "\n".join(faults)
    assert not unused


def test_a_participle_is_found_as_a_name():
    text = "def f(given, x): return [one for one in x if (found := x)]"
    (function,) = functions_of(ast.parse(text))
    assert bare_words(function) == ["given", "one", "found"]
