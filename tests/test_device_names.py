"""Names of the device code that a reader could confuse: what its declarations say."""

import re
from collections.abc import Iterator

import pytest

from etc_dist.runtime.build import kernels_folder
from tests.test_names import TRUTHS, WORDS

DEVICE_WORDS = WORDS | {"came", "going"}
TYPE = r"(?:auto|bool|float\d?|int|uint\d|[iu](?:8|16|32|64)|[A-Z]\w*(?:<[^;(){}]*>)?)"
DECLARATION = re.compile(
    rf"\b({TYPE})(?:\s*[&*]\s*|\s+)(\w+)(?=\s*(?:[=;,){{\[:]|$))", re.MULTILINE
)
STATEMENT = re.compile(rf"\b({TYPE})\b[&*]? (\w+ = [^;(){{}}]*);")
"""One type and the names of several values, as in `bool is_a = b, c = d;`."""
EXCEPTIONS = {
    ("event/layout.cuh", "begun"): "a field that the host reads by its name",
    ("event/layout.cuh", "ended"): "a field that the host reads by its name",
    ("event/layout.cuh", "started"): "a field that the host reads by its name",
    ("common/operand.cuh", "cross_rank"): "a field that generated text sets",
}


def declared(text: str) -> Iterator[tuple[str, str]]:
    """The types and names of values that a header declares."""
    code = re.sub(r"//.*", "", text)
    yield from DECLARATION.findall(code)
    for type_, names in STATEMENT.findall(code):
        yield from ((type_, name) for name in re.findall(r", (\w+) = ", names))


def misnamed(text: str) -> list[str]:
    """The values that are named by a participle, and Booleans without is_ or has_.
    Not functions that are arguments, of a type of the same name, nor the left side of
    two."""
    values = [pair for pair in declared(text) if pair[0] != pair[1].capitalize()]
    allowed = {"left"} if re.search(r"\bright\b", text) else set()
    return [
        name
        for type_, name in values
        if name.strip("_") in DEVICE_WORDS - allowed
        or (
            type_ == "bool"
            and not re.match(r"k[A-Z]", name)
            and not name.strip("_").startswith(TRUTHS)
        )
    ]


def headers() -> dict[str, str]:
    root = kernels_folder()
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for path in sorted(root.rglob("*.cuh"))
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
    ],
)
def test_a_participle_and_a_boolean_are_found_in_declarations(text, names):
    assert misnamed(text) == names
