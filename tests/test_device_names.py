"""Names of the device code that a reader could confuse: what its declarations say."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from etc_dist.runtime.build import kernels_folder
from tests.test_names import SIZES, TRUTHS, WORDS

DEVICE_WORDS = WORDS | {"came", "going"}
PREPOSITIONS = {"at", "by", "from", "in", "into", "of", "on", "to", "with"}
LETTERS = "ijgctfmnkwxyzabd"
"""Indices; the arguments, the coordinate and the index of a task, as in generated text;
a function that is an argument; letters of a matmul, and of instructions and operators.
Loops may use others."""
DEVICE_SIZES = SIZES | {"stages", "tasks", "threads", "tokens"}
PACKED = {"bits", "codes", "halves"}
"""What a word holds several of."""

INTEGERS = {"int", "i32", "i64", "u32"}
"""Not u64: an address, of what its name says."""
TYPE = (
    r"(?:auto|bool|char|void|float\d?|int|uint\d|uint64_t|unsigned long long|"
    r"[iu](?:8|16|32|64)|bf16|f16|e4m3|(?:\w+::)*[A-Z]\w*(?:<[^;(){}]*?>)?(?:::\w+)*)"
)
DECLARATION = re.compile(
    rf"(?<![\w:.])({TYPE})(\s*(?:[&*]|\.\.\.)+\s*|\s+)(?:const\s+)?"
    r"(?:\(&\s*(\w+)\)|([A-Za-z_]\w*)|\[([\w, ]+)\](?=\s*[=:]))"
)
FOLLOWING = re.compile(r"\s*([&*]*)\s*([A-Za-z_]\w*)\s*(?=[=;,\[{])")
KEYWORDS = {"const", "constexpr", "operator", "return"}
EXCEPTIONS = {
    ("common/operand.cuh", "cross_rank"): "a field that generated text sets",
    ("common/operand.cuh", "index"): "a field that generated text reads",
    ("event/layout.cuh", "begun"): "a field that the host reads by its name",
    ("event/layout.cuh", "ended"): "a field that the host reads by its name",
    ("event/layout.cuh", "faults"): "a field that the host reads by its name",
    ("event/layout.cuh", "index"): "a field that the host reads by its name",
    ("event/layout.cuh", "started"): "a field that the host reads by its name",
    ("event/wait.cuh", "index"): "as in the fault that the host reads",
    ("functions/append_kv.cuh", "v"): "attention's letters",
    ("functions/attend.cuh", "o"): "attention's letters",
    ("functions/attend.cuh", "p"): "attention's letters",
    ("functions/attend.cuh", "q"): "attention's letters",
    ("functions/attend.cuh", "v"): "attention's letters",
    **{
        ("functions/attend_prompt.cuh", letter): "attention's letters"
        for letter in "opqv"
    },
    ("functions/tile_shape.cuh", "at"): "a field that says where its struct is",
    ("functions/tile_shape.cuh", "number"): "a field, as in functions/tile_matmul.py",
    ("worker/stage_placer.cuh", "at"): "a field that says where its struct is",
}


class Value(NamedTuple):
    type: str
    name: str
    is_single: bool
    """Whether it is no array and no pointer."""
    is_loop: bool
    """Whether a `for` counts it."""


def declared(text: str) -> Iterator[Value]:
    """The values that a header declares."""
    code = re.sub(r'//.*|"(?:[^"\\\n]|\\.)*"', "", text)
    for match in DECLARATION.finditer(code):
        type_, mark, array, name, bound = match.groups()
        start, end = match.span()
        line = code[code.rfind("\n", 0, start) + 1 : start]
        is_loop = "for (" in line and ";" not in line.rpartition("for (")[2]
        is_loop = is_loop and code[end:].lstrip().startswith("=")
        for part in re.findall(r"\w+", bound or ""):
            yield Value("auto", part, is_single=True, is_loop=is_loop)
        if array:
            yield Value(type_, array, is_single=False, is_loop=False)
        if bound or array or not is_declared(type_, name, code[end:], line):
            continue
        is_single = "*" not in mark and not code[end:].startswith("[")
        yield Value(type_, name, is_single, is_loop)
        for mark_and_name in following(code[end:]):
            yield Value(
                type_, mark_and_name[1], is_single=not mark_and_name[0], is_loop=is_loop
            )


def is_declared(type_: str, name: str, tail: str, line: str) -> bool:
    """Whether a type and a name in `line` declare a value, not a function."""
    if type_ in KEYWORDS or name in KEYWORDS or re.fullmatch(TYPE, name):
        return False
    if re.match(r"\s*\([^{}]*?\)+;", tail):  # a value, constructed, or a function
        return not line.strip() or line.strip() == "const"
    return re.match(r"\s*(?:[=;,){\[>]|:(?!:)|$)", tail) is not None


def following(tail: str) -> Iterator[tuple[str, str]]:
    """The names after the first one of a declaration, with "*" or "[" of arrays and
    pointers."""
    depth = 0
    for letter_idx, letter in enumerate(tail):
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0 or (letter == ";" and depth == 0):
            return
        if letter == "," and depth == 0:
            match = FOLLOWING.match(tail, letter_idx + 1)
            if match is None or re.fullmatch(TYPE, match[2]) or match[2] in KEYWORDS:
                return
            yield match[1].strip("&") + tail[match.end()].strip("=;,{"), match[2]


def is_misnamed(value: Value, words: set[str]) -> bool:
    """Whether the name of a value does not say what it is, or how it counts."""
    name = value.name.strip("_")
    if len(name) == 1:
        return name not in LETTERS and not name.isupper() and not value.is_loop
    if name in words | PREPOSITIONS:
        return True
    if re.match(r"k[A-Z]", name):
        return False
    if value.type == "bool":
        return not name.startswith(TRUTHS)
    if value.type not in INTEGERS or name.startswith("num_"):
        return False
    if name in ("index", "number") or name.endswith(("_index", "_number")):
        return True
    noun = name.rpartition("_")[2]
    is_plural = noun.endswith("s") and not noun.endswith(("as", "is", "ss", "us"))
    return value.is_single and is_plural and noun not in DEVICE_SIZES | PACKED


def misnamed(text: str) -> list[str]:
    """The values that are named by participles, prepositions and letters, Booleans
    without is_ or has_, counts without num_ and indices without _idx. Not functions
    that are arguments, of a type of the same name, nor the left side of two."""
    allowed = {"left"} if re.search(r"\bright\b", text) else set()
    return [
        value.name
        for value in declared(text)
        if value.type != value.name.capitalize()
        and is_misnamed(value, DEVICE_WORDS - allowed)
    ]


def headers() -> dict[str, str]:
    root = kernels_folder()
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for path in sorted(root.rglob("*.cu*"))
    }


def test_values_of_the_device_code_are_named_by_nouns():
    names = {
        (file, name) for file, text in headers().items() for name in misnamed(text)
    }
    assert names == {*EXCEPTIONS}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("const u32 found = page[n];", ["found"]),
        ("f(bool wanted, u64 address) {", ["wanted"]),
        ("bool is_late = a < b, lost = false;", ["lost"]),
        ("const StageCursor<Program>& begun_;", ["begun_"]),
        ("bool ends = a == b;", ["ends"]),
        ("u32 left = sum, right = 0;", []),
        ("f(u32 size, Loaded loaded) {", []),
        ("static constexpr bool kHasLaps = true;  // bool found = b;", []),
        ("const i32 num_left = left(g), is_found = has(a, left);", []),
        ("i32 row = f(a, b), found, size;", ["found"]),
        ("const u64 stride = s(4), from = u64(at(0, row));", ["from"]),
        ("f(u32 (&found)[4], const u32 (&words)[kWords]) {", ["found"]),
        ("const auto [known, size] = f();", ["known"]),
        ("  const Row of(task, row);", ["of"]),
        ("template <int v, class Program>", ["v"]),
        ("ETC_DEVICE u32 at(u32 base) const { return base; }", []),
        ("float2 v[2], sum = {};", ["v"]),
        ("for (int p = 0; p < 4; ++p) q(p);", []),
        ("for (float& v : sums) keep(v);", ["v"]),
        ("f(const Args& g, i32 t, u32 s) {", ["s"]),
        ("i32 rows = 0, tiles = 0, num_slots = 0;", ["tiles"]),
        ("u32 *tiles, lanes[kCount], chosen_bits = 0;", []),
        ("u64 scales = u64(x.at());", []),
        ("f(u32 row_index, i32 number) {", ["row_index", "number"]),
    ],
)
def test_names_are_found_in_declarations(text, names):
    assert misnamed(text) == names
