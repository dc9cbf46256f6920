"""Names of the package that a reader could confuse."""

import ast
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.sources import PACKAGE, nodes_of, tree_of

PARTICIPLES = """added arrived asked awaited begun cached changed chosen claimed counted
done ended found gathered given got held included joined kept known left listed loaded
lost made merged met named needed notified ordered planned reached received refused
required returned said seen sent served shown skipped started stored supposed taken
unknown used wanted written"""
PRONOUNS = "both each it mine one other others own rest that them these this those"
WORDS = {*PARTICIPLES.split(), *PRONOUNS.split()}
"""These alone do not say what a value is: a noun does, as in `kept_pages`."""
EXCEPTIONS = {
    ("ir/tensor.py", "other"): "a keyword argument of a public method",
    ("launch/mps.py", "got"): "the third part of an error",
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

TRUTHS = ("is_", "has_")
"""How the names of Booleans begin, but for those of options of public functions."""
OF_JSON = {"ensure_ascii", "sort_keys"}
"""Options of `json.dumps`, which templates pass by name."""
COORDINATES = {"axis", "expert", "rank", "row"}
"""Things that are numbers themselves, so that an index of them has their name."""
SIZES = {
    *("bytes", "columns", "elements", "experts", "heads", "hosts", "layers", "ms"),
    *("nbytes", "ns", "ranks", "rows", "us", "words", "workers"),
}
"""Extents, dims and units, whose names have no `num_`."""

ROOT = Path(__file__).parent.parent
SCRIPTS = ("benchmarks", "docs", "examples", "launch")
"""Further folders where names are checked."""
OF_TORCH = ["MLP", "MoE"]
"""Layers that are modules of torch, too, as users expect."""


@cache
def trees() -> dict[str, ast.Module]:
    """The modules of the package by their files."""
    return {
        path.relative_to(PACKAGE).as_posix(): tree_of(path)
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def all_trees() -> dict[str, ast.Module]:
    """Also those of SCRIPTS."""
    return trees() | trees_in(SCRIPTS)


@cache
def trees_with_tests() -> dict[str, ast.Module]:
    """Also those of tests."""
    return all_trees() | trees_in(["tests"])


def trees_in(folders: Iterable[str]) -> dict[str, ast.Module]:
    return {
        path.relative_to(ROOT).as_posix(): tree_of(path)
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def test_no_two_classes_share_a_name():
    classes = [
        node.name
        for tree in trees().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    ]
    shared = sorted(name for name, count in Counter(classes).items() if count > 1)
    assert shared == OF_TORCH


def test_no_two_modules_share_a_stem():
    stems = Counter(Path(file).stem for file in trees())
    assert [stem for stem, count in stems.items() if count > 1] == ["__init__"]


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
    for node in nodes_of(function):
        if isinstance(node, ast.Raise):
            values.append(node)
        elif isinstance(node, ast.keyword) and node.arg in ("wanted", "got"):
            values.append(node.value)
    names = {n.id for v in values for n in nodes_of(v) if isinstance(n, ast.Name)}
    return names & {"wanted", "got"}


def bare_words(function: ast.AST) -> list[str]:
    """The words of WORDS that name a local value or a parameter of `function`."""
    name = getattr(function, "name", "")
    names = [*bound_names(ast.Module([function], []))]  # type: ignore[list-item]
    is_error = not {"wanted", "got"}.isdisjoint(names)
    allowed = fields_of_errors(function) if is_error else set()
    if "right" in names:
        allowed.add("left")  # the sides of an operator
    if name.startswith("__") and name != "__init__":
        allowed.add("other")  # as in Python's data model
    return [n for n in names if n.strip("_") in WORDS - allowed]


def test_local_values_are_named_by_nouns():
    faults, unused = [], {*EXCEPTIONS}
    for file, tree in trees_with_tests().items():
        for function in functions_of(tree):
            where = f"{file}:{getattr(function, 'lineno', 0)}"
            words = bare_words(function)
            unused -= {(file, word) for word in words}
            faults += [
                f"{where} {word}" for word in words if (file, word) not in EXCEPTIONS
            ]
    assert not faults, "\n".join(faults)
    assert not unused


def assignments(function: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The local names that an `=` or `:=` in `function` binds, and their values."""
    for node in nodes_of(function):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
            targets = [node.target]
        value = getattr(node, "value", None)
        for target in targets:
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = [*zip(target.elts, value.elts, strict=False)]
            for part, part_value in pairs:
                if isinstance(part, ast.Name) and part_value is not None:
                    yield part.id, part_value


def called(value: ast.AST) -> str:
    """The name of the function that `value` calls, such as "len"."""
    names = []
    part = value.func if isinstance(value, ast.Call) else None
    while isinstance(part, ast.Attribute):
        names.append(part.attr)
        part = part.value
    if isinstance(part, ast.Name) or names:
        names.append(part.id if isinstance(part, ast.Name) else "")
    return ".".join(reversed(names))


def is_truth(value: ast.AST) -> bool:
    """Whether the text of an expression shows that it is a Boolean."""
    if isinstance(value, ast.BoolOp):
        return all(map(is_truth, value.values))
    if isinstance(value, ast.UnaryOp):
        return isinstance(value.op, ast.Not)
    is_constant = isinstance(value, ast.Constant) and isinstance(value.value, bool)
    return (
        is_constant
        or isinstance(value, ast.Compare)
        or called(value) in ("all", "any", "bool", "hasattr", "isinstance")
        or called(value).endswith((".startswith", ".endswith", ".isdigit"))
    )


def truths_of(function: ast.AST) -> Iterator[str]:
    """The names of Booleans in `function`: locals and, if it is private, parameters."""
    yield from (name for name, value in assignments(function) if is_truth(value))
    for node in nodes_of(function):
        if isinstance(node, ast.FunctionDef) and is_private(node.name):
            for arg in arguments(node):
                if arg.annotation and ast.unparse(arg.annotation) == "bool":
                    yield arg.arg


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def arguments(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.args, *function.args.kwonlyargs]


def options_of(modules: Iterable[ast.AST]) -> set[str]:
    """The names of parameters of public functions: who passes one on may keep it."""
    return {
        arg.arg
        for module in modules
        for node in nodes_of(module)
        if isinstance(node, ast.FunctionDef) and not is_private(node.name)
        for arg in arguments(node)
    }


def is_plural(name: str) -> bool:
    """Whether it is a noun in the plural without `num_`, and not one of SIZES."""
    noun = name.rpartition("_")[2]
    is_noun = noun.endswith("s") and not noun.endswith(("ss", "us", "is"))
    return is_noun and noun not in SIZES and not name.strip("_").startswith("num_")


def is_quotient(value: ast.AST) -> bool:
    """Whether an expression, or the number that it names in a graph, is a quotient."""
    if called(value) in ("g.let", "self._g.let", "int"):
        return is_quotient(value.args[-1])  # type: ignore[attr-defined]
    if isinstance(value, ast.UnaryOp):
        value = value.operand
    is_division = isinstance(value, ast.BinOp) and isinstance(value.op, ast.FloorDiv)
    return is_division or called(value) == "ceildiv"


def is_number(annotation: ast.expr | None) -> bool:
    kinds = ast.unparse(annotation).split(" | ") if annotation else [""]
    return {*kinds} <= {"int", "Expr", "None"}


def misnamed(function: ast.AST, options: Collection[str] = ()) -> list[str]:
    """The Booleans, lengths and indices in `function` whose names do not say so."""
    faults = [
        name
        for name in truths_of(function)
        if not name.strip("_").startswith(TRUTHS) and name not in options
    ]
    for name, value in assignments(function):
        if called(value) == "len" and not name.startswith("num_"):
            faults += [] if name.endswith("_idx") else [name]
        elif is_quotient(value) and is_plural(name):
            faults.append(name)
    for node in nodes_of(function):
        if isinstance(node, ast.FunctionDef) and is_private(node.name):
            faults += [
                arg.arg
                for arg in arguments(node)
                if is_plural(arg.arg)
                and is_number(arg.annotation)
                and arg.arg not in options
            ]
    for node in nodes_of(function):
        is_loop = isinstance(node, (ast.For, ast.comprehension))
        if is_loop and called(node.iter) == "enumerate":
            name = ast.unparse(node.target).strip("()").partition(",")[0]
            if len(name) > 1 and not name.endswith(("_idx", "_rank", "_id", "_number")):
                faults += [] if name in COORDINATES else [name]
    return faults


def test_booleans_counts_and_indices_are_named_so():
    options = options_of(all_trees().values()) | OF_JSON
    faults = [
        f"{file}:{function.lineno} {name}"
        for file, tree in trees_with_tests().items()
        for function in functions_of(tree)
        if isinstance(function, ast.FunctionDef)
        for name in misnamed(function, options)
    ]
    assert not faults, "\n".join(faults)


def starred_lists(function: ast.AST) -> Iterator[int]:
    """The lines of calls with `*(a, b)`, or with `*x` of a local `x = a, b` that
    nothing else uses: arguments whose parameters a reader has to count."""
    names = [node for node in nodes_of(function) if isinstance(node, ast.Name)]
    uses = Counter(node.id for node in names)
    lists = {
        name
        for name, value in assignments(function)
        if isinstance(value, ast.Tuple) and uses[name] == 2
    }
    for node in nodes_of(function):
        if isinstance(node, ast.Call):
            stars = [a.value for a in node.args if isinstance(a, ast.Starred)]
            for star in stars:
                is_list = isinstance(star, (ast.List, ast.Tuple))
                if is_list or getattr(star, "id", "") in lists:
                    yield star.lineno


def test_no_call_has_a_star_before_a_list_of_arguments():
    faults = [
        f"{file}:{line}"
        for file, tree in all_trees().items()
        for function in functions_of(tree)
        for line in starred_lists(function)
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("g(*(a, b))", [2]),
        ("x = a, b; g(*x)", [2]),
        ("x = a, b; g(*x); h(*x)", []),
        ("g(*a)", []),
    ],
)
def test_a_star_before_a_list_is_found(text, lines):
    (function,) = functions_of(ast.parse(f"def f(a, b):\n    {text}"))
    assert [*starred_lists(function)] == lines


def private_attributes(class_: ast.ClassDef) -> Iterator[tuple[str, bool]]:
    """The attributes that a class binds and others do not use: those with `_`, and all
    of a private class; each with whether it is a Boolean."""
    for node in nodes_of(class_):
        targets = node.targets if isinstance(node, ast.Assign) else []
        is_bool = False
        if isinstance(node, ast.AnnAssign):
            targets, is_bool = [node.target], ast.unparse(node.annotation) == "bool"
        for target in targets:
            is_tuple = isinstance(target, ast.Tuple)
            for part in target.elts if is_tuple else [target]:
                name = getattr(part, "attr", "")
                if isinstance(part, ast.Name) and node in class_.body:
                    name = part.id
                if name and (is_private(name) or is_private(class_.name)):
                    is_bool |= not is_tuple and is_truth(node.value)
                    yield name, is_bool


def misnamed_attributes(class_: ast.ClassDef) -> list[str]:
    """The private attributes that are named by WORDS, and Booleans without TRUTHS."""
    return [
        name
        for name, is_bool in private_attributes(class_)
        if name.strip("_") in WORDS - {"got", "wanted"}
        or (is_bool and not name.strip("_").startswith(TRUTHS))
    ]


def test_private_attributes_are_named_by_nouns():
    faults = [
        f"{file} {node.name}.{name}"
        for file, tree in trees_with_tests().items()
        for node in nodes_of(tree)
        if isinstance(node, ast.ClassDef)
        for name in misnamed_attributes(node)
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("self._closed = False", ["_closed"]),
        ("self._left, self.n = 1, 2", ["_left"]),
        ("self.closed, self._is_open = a < b, True", []),
    ],
)
def test_private_attributes_are_found_by_their_names(text, names):
    (node,) = ast.parse(f"class A:\n def f(self):\n  {text}").body
    assert isinstance(node, ast.ClassDef)
    assert misnamed_attributes(node) == names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("fits = a < b and not c", "fits"),
        ("if n := len(a): pass", "n"),
        ("size, end = len(a), 0", "size"),
        ("tiles = -(-a // 8)", "tiles"),
        ("tiles = g.let('tiles', ceildiv(a, 8))", "tiles"),
        ("def _g(steps: int | Expr): pass", "steps"),
        ("for number, x in enumerate(a): pass", "number"),
        ("def _g(*, early: bool): pass", "early"),
        ("is_far, num_rows, line_idx = a < b, len(a), len(b)", ""),
        ("row_bytes = a // 8", ""),
        ("def _g(lines: Sequence[int]): pass", ""),
        ("for i, x in enumerate(a): pass", ""),
        ("packs = a < b", ""),
    ],
)
def test_a_boolean_a_length_and_an_index_are_found_by_their_names(text, name):
    (function,) = functions_of(ast.parse(f"def f(a):\n    {text}"))
    options = options_of([ast.parse("def graph(*, packs): pass")])
    assert misnamed(function, options) == ([name] if name else [])


def test_a_participle_is_found_as_a_name():
    text = "def f(given, x): return [one for one in x if (found := x)]"
    (function,) = functions_of(ast.parse(text))
    assert bare_words(function) == ["given", "one", "found"]
