"""Checking the rows of a step, on the device; CUDA half in
`kernels/functions/check_rows.cuh`.

`append_kv.py` describes rows and pages. `check_rows` finds a number out of range of
each kind. Calls of `expect_in_range` then use these numbers as loaded indices. An index
out of range ends the run with an error that names the call and the tensor.
`add_row_checks` adds all these calls to a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from etc_dist.ir import DeviceFunction, EventRef, Extent, Graph, Operand, Region, Tensor
from etc_dist.ir.function import TENSOR, TRANSFER

CHECKS = 5
"""Kinds of numbers that are checked."""

REQUEST, POSITION, PAGE_INDEX, PAGE, TOKEN = range(CHECKS)
"""The elements of `worst`: a row's request; its last position; the index of this
position in the table of pages; a page of one of its positions; its token."""


def add_row_checks(
    g: Graph,
    page_size: int,
    cos_sin: Tensor,
    table: Tensor,
    cache: Tensor,
    embedding: Tensor,
    given: Sequence[Region],
    copies: Sequence[Region],
    copied: EventRef | None = None,
    checked: Sequence[EventRef] = (),
) -> None:
    """Adds calls that copy rows, and end the run with an error if some are out of
    range. Otherwise each event of `checked` is notified CHECKS times.

    given, copies: request, position, end and ids. cache: that of all layers,
    [layers, pages, ...]. embedding: [vocabulary, ...]. copied: notified once all copies
    are complete."""
    worst = g.local("worst", (CHECKS,), "int32")
    found = g.events("found_worst", (1,), expects=1)
    g.call(
        check_rows(page_size),
        g.grid(one=1),
        reads=[cos_sin[:, :], table[:, :], *given],
        writes=[worst[:], *copies],
        notifies=[found[0], *([] if copied is None else [copied])],
        values={"pages": cache.shape[1], "vocabulary": embedding.shape[0]},
    )
    for name, element in (
        ("request_exists", table[worst.load(REQUEST), 0]),
        ("table_is_long_enough", table[0, worst.load(PAGE_INDEX)]),
        ("position_exists", cos_sin[worst.load(POSITION), 0]),
        ("page_exists", cache[0, worst.load(PAGE), 0, 0, 0, 0]),
        ("token_exists", embedding[worst.load(TOKEN), 0]),
    ):
        g.call(
            expect_in_range(),
            g.grid(one=1),
            name=name,
            reads=[element],
            waits=[found[0]],
            notifies=checked,
        )


def check_rows(page_size: int) -> DeviceFunction:
    """cos_sin [positions, ...], table [requests, most_pages], request, position, end
    and ids [rows] -> worst [5]: of each kind, a number that is out of range, or 0; and
    copies of the rows, which are read once.

    `pages` and `vocabulary`: dims or named numbers. A row has the positions from its
    own to end - 1; one with a position below 0 has none."""

    def body(
        cos_sin: Any,
        table: Any,
        request: Any,
        position: Any,
        end: Any,
        ids: Any,
        worst: Any,
        *copies: Any,
        pages: int,
        vocabulary: int,
    ) -> None:
        for copy, given in zip(copies, (request, position, end, ids), strict=True):
            copy[...] = given
        here = position >= 0
        known = here & (request >= 0) & (request < len(table))
        last = np.maximum(position, end - 1)
        index = last // page_size
        is_used = np.arange(table.shape[1]) <= index[known, None]
        used = table[request[known]][is_used]
        worst[...] = (
            _worst(request[here], len(table)),
            _worst(last[here], len(cos_sin)),
            _worst(index[here], table.shape[1]),
            _worst(used, pages),
            _worst(ids[here], vocabulary),
        )

    return DeviceFunction(
        name="check_rows",
        body=body,
        source="functions/check_rows.cuh",
        lane=TENSOR,
        reads=6,
        writes=5,
        constants={"kPageSize": page_size},
        tile={
            0: Operand((Extent(begins=0), None), "float32"),
            1: Operand((Extent(begins=0), Extent(whole=True)), "int32"),
            2: Operand(("rows",), "int32"),
            **dict.fromkeys(
                (3, 4, 5, 7, 8, 9, 10), Operand(("rows",), "int32", leading=True)
            ),
            6: Operand((CHECKS,), "int32"),
        },
    )


def _worst(values: Any, limit: int) -> Any:
    """A number that is not in 0 .. limit - 1, or 0; always the same one."""
    unsigned = values.astype(np.uint32)
    return unsigned[unsigned >= limit].max(initial=0).astype(np.int32)


def expect_in_range() -> DeviceFunction:
    """Reads an element at loaded indices, and does nothing with it: out of range, it
    ends the run with an error that names the call."""

    def body(element: Any) -> None:
        np.shape(element)

    return DeviceFunction(
        name="expect_in_range",
        body=body,
        source="functions/check_rows.cuh",
        lane=TRANSFER,
        reads=1,
        writes=0,
    )
