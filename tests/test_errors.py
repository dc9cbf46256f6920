"""Errors: four parts in the message, and nothing lost on the way between ranks."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from etc_dist import errors
from etc_dist.errors import (
    ArgumentError,
    BuildError,
    DeadlockError,
    EtcDistError,
    GraphError,
    NotFiniteError,
    RaceError,
    SymmetricMemoryError,
    WaitRecord,
    WaitTimeoutError,
    WorldError,
    expect_type,
)

PARTS = {"where": "here", "wanted": "good", "got": "bad", "fix": "correct it"}
CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, EtcDistError)
]
RECORD = WaitRecord(1, 7, "transfer", "sum_ranks[0, 3]", "ready[0, 3]", 2, 4)


def pickled(error: EtcDistError) -> EtcDistError:
    return pickle.loads(pickle.dumps(error))


@pytest.mark.parametrize("kind", CLASSES)
def test_a_message_has_four_parts(kind):
    assert str(kind("it failed", **PARTS)) == (
        "it failed\n  where:  here\n  wanted: good\n  got:    bad\n  to do:  correct it"
    )


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_survives_pickling(kind):
    error = kind("it failed", **PARTS)
    again = pickled(pickled(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert (again.what, again.fix) == ("it failed", "correct it")


@pytest.mark.parametrize(
    ("kind", "parents"),
    [
        (ArgumentError, (ValueError,)),
        (DeadlockError, (GraphError,)),
        (RaceError, (GraphError,)),
        (SymmetricMemoryError, (WorldError, MemoryError)),
        (WaitTimeoutError, (TimeoutError,)),
        (NotFiniteError, (ArithmeticError,)),
    ],
)
def test_an_error_is_also_what_python_would_raise(kind, parents):
    assert all(issubclass(kind, parent) for parent in parents)


def test_a_wait_record_reads_as_a_sentence():
    assert str(RECORD) == (
        "rank 1, worker 7, transfer lane: sum_ranks[0, 3] waits for ready[0, 3]: "
        "have 2, want 4"
    )


def test_a_timeout_keeps_its_records():
    error = WaitTimeoutError("it failed", **PARTS, records=(RECORD, RECORD))
    assert pickled(error).records == (RECORD, RECORD)


def test_a_build_error_keeps_its_source_and_numbers_its_lines():
    error = BuildError("it failed", **PARTS, source="int a;\nint b;\n")
    again = pickled(error)
    assert isinstance(again, BuildError)
    assert again.numbered() == "   1  int a;\n   2  int b;"


def test_the_tree_at_the_top_of_the_file_names_every_class():
    drawn = errors.__doc__ or ""
    assert [kind.__name__ for kind in CLASSES if kind.__name__ not in drawn] == []


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (3, str, "f() expects a str, got int"),
        (None, int, "f() expects an int, got None"),
        (True, int, "f() expects an int, got bool"),
        (1.5, (int, type(None)), "f() expects an int or None, got float"),
    ],
)
def test_wrong_type_is_a_type_error_with_both_types(value, kind, message):
    with pytest.raises(TypeError) as caught:
        expect_type(value, kind, "f()")
    assert str(caught.value) == message


def test_wrong_type_names_the_fix():
    with pytest.raises(TypeError, match="expects a str, got int; write '3'"):
        expect_type(3, str, "f()", fix="write '3'")


@pytest.mark.parametrize(
    ("value", "kind"),
    [("x", str), (np.int64(3), int), (True, bool), (None, (int, type(None)))],
)
def test_right_type_is_accepted(value, kind):
    expect_type(value, kind, "f()")
