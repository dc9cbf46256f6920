"""Equal shares of the positions that the rows of a step attend to, and blocks of rows;
CUDA half in `kernels/functions/plan_shares.cuh`.

Positions are counted in stages of STAGE. Each row has one unit for each of its stages,
and one for its fixed time. All units of a step, row by row, are divided into equal
shares by arithmetic. A share then begins at a stage of a row, and has slices of rows:
the last stages of one, whole rows, and the first stages of another.

A run is rows of successive positions of a request, such as those of a prompt. The last
rows of a step may be divided into blocks, each of adjacent rows of one run, which are
attended together. They are in no share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from etc_dist.functions.append_kv import PagedCache
from etc_dist.ir import DeviceFunction, Extent, Operand

STAGE = 64
"""Positions of a stage."""
CUT, MOST_CUTS = 16, 16
"""In order, a row is cut after each CUT stages, or into MOST_CUTS slices if these are
longer."""
SLACK = 4
"""Stages that the longest part of a worker may exceed the mean where shares begin with
rows. An H200 reads so many of 128 elements in 4 us at most, which is the price of the
combination."""
LEAST_RUN = 16
"""The fewest rows of a run whose rows are in blocks. A block takes about as long for
fewer rows, and shares divide their positions over all workers."""
CUTS = {"kCut": CUT, "kMostCuts": MOST_CUTS}
"""Constants of CUDA bodies."""
MOST_ROWS, MOST_SHARES = 2048, 1024
MARKS = 2**16
"""Written pages are found by their numbers modulo MARKS: others may seem to be, too."""
EXTENT, BOUND = 4, 4
"""Numbers of an extent, see `plan_shares`; and of a bound: a row, a stage of it, the
stages of all rows before this one, and the first slot."""


def plan_shares(paged: PagedCache, block_rows: int = 0) -> DeviceFunction:
    """`PagedCache.operands` of the rows, without the gain -> int32:

    * extents [rows, EXTENT]: the first position that each row attends to, and the
      number of positions up to its own; how many are in pages before the first one
      that a row of this step writes to, so that earlier steps stored them; and its
      request. Zeros if the row is out of range, or one of its pages.
    * bounds [shares + 1, BOUND]: where each share begins; the last one follows all
      rows. See `slices_of`.
    * combined [most, 3]: of each row that has several slices, the row, the first of the
      slots of its slices, and their number, 0 beyond the last one; and num_combined
      [1].
    * with block_rows, the most rows of a block: blocks [1 + most, 2], the number of
      blocks and 0, then the first row and the number of rows of each, 0 beyond the
      last one. These are the last rows of the step, as many as have at most `most`
      blocks, in whole runs of at least LEAST_RUN rows; at the end also rows without
      positions. The shares are those of all rows before.

    Dims or named numbers: pages, of the cache. lists: shares of a worker. cuts: 0, or
    the slots of a row. If it is 0, share s has the slots 2 s and 2 s + 1, of slices
    that do not begin their row, and that do. Shares then begin with rows if no worker
    gets much more than its part by that, so that no row has several slices. Otherwise
    rows are cut, see `cut_of`, shares begin at cuts, and row r has the slots from r *
    cuts on: its slices depend on its length alone."""

    plain = PagedCache(
        paged.head_dim,
        paged.page_size,
        paged.dtype,
        has_span=paged.has_span,
        tables=paged.tables,
    )

    def body(*operands: Any, pages: int, lists: int, cuts: int) -> None:
        num_writes = 4 + (block_rows > 0)
        *first, cos_sin, request, position, table = operands[:-num_writes]
        extents, bounds, combined, num_combined, *blocks = operands[-num_writes:]
        _, (window, _) = plain.split(first)
        lengths = paged.lengths(cos_sin, request, position, table)
        extents[:, 0], extents[:, 1] = np.maximum(lengths - window, 0), lengths
        extents[:, 3] = request
        at, here = position // paged.page_size, np.flatnonzero(lengths)
        new_pages = table[request[here], at[here]] % MARKS
        for row, (begin, end, *_) in enumerate(extents):
            pages_of = slice(begin // paged.page_size, -(-end // paged.page_size))
            row_pages = table[request[row], pages_of] if end else np.full(1, -1)
            if row_pages.min() < 0 or row_pages.max() >= pages:
                extents[row] = 0
                continue
            first = np.flatnonzero(np.isin(row_pages % MARKS, new_pages)).min(
                initial=len(row_pages)
            )
            extents[row, 2] = (pages_of.start + first) * paged.page_size
        of_shares = extents
        for block_list in blocks:
            num_rows, of_blocks = blocks_of(extents, len(block_list) - 1, block_rows)
            of_shares = extents[:num_rows]
            block_list[...] = 0
            block_list[: 1 + len(of_blocks)] = [(len(of_blocks), 0), *of_blocks]
        bounds[...] = bounds_of(of_shares, len(bounds) - 1, lists, cuts)
        entries = list(_combined(of_shares, bounds, cuts))
        combined[...] = 0
        combined[: len(entries)] = np.reshape(entries, (-1, 3))
        num_combined[...] = len(entries)

    rows = Extent(most=MOST_ROWS, name="rows")
    bounds = Operand((Extent(most=MOST_SHARES + 1), BOUND), "int32", leading=True)
    reads = {n: o for n, o in paged.operands("rows").items() if n != "gain"}
    writes = {
        "extents": Operand((rows, EXTENT), "int32", leading=True),
        "bounds": bounds,
        "combined": Operand((None, 3), "int32", leading=True),
        "num_combined": Operand((1,), "int32", leading=True),
    }
    constants = {"kStage": STAGE, **CUTS, "kSlack": SLACK, "kMostRows": MOST_ROWS}
    constants |= {"kMostShares": MOST_SHARES, "kMarks": MARKS}
    if block_rows > 0:
        writes["blocks"] = Operand((None, 2), "int32", leading=True)
        constants |= {"kBlockRows": block_rows, "kLeastRun": LEAST_RUN}
    return plain.function("plan_shares", body, reads, writes, constants)


def blocks_of(
    extents: Any, most: int, block_rows: int
) -> tuple[int, list[tuple[int, int]]]:
    """The number of rows before those of blocks, and the first row and the number of
    rows of each block."""
    end, request = extents[:, 1], extents[:, 3]
    is_next = (end[1:] == end[:-1] + 1) & (request[1:] == request[:-1])
    is_next &= end[:-1] > 0
    is_next |= (end[1:] == 0) & (end[:-1] == 0)
    num_rows, blocks = len(extents), list[tuple[int, int]]()
    for first in np.flatnonzero([True, *~is_next])[::-1].tolist():
        run = range(first, num_rows)
        is_last = len(run) >= LEAST_RUN if end[first] > 0 else num_rows == len(extents)
        of_run = [
            (row, len(run[row - first :][:block_rows])) for row in run[::block_rows]
        ]
        if not is_last or len(blocks) + len(of_run) > most:
            break
        blocks += of_run
        num_rows = first
    return num_rows, blocks


def stages_of(extents: Any) -> Any:
    """The number of stages of rows."""
    begin, end = extents[..., 0], extents[..., 1]
    return -(-end // STAGE) - begin // STAGE


def cut_of(stages: Any) -> Any:
    """The stages of a slice, but for the last one, of a row that is cut."""
    return np.maximum(CUT, -(-stages // MOST_CUTS))


def bounds_of(extents: Any, shares: int, lists: int, cuts: int) -> Any:
    """The bounds of `plan_shares`."""
    num_rows = len(extents)
    if num_rows == 0:
        extents = np.zeros((1, EXTENT), np.int64)
    stages = stages_of(extents.astype(np.int64))
    before = np.concatenate([[0], np.cumsum(stages + 1)])
    total = before[-1]
    exact = np.arange(shares + 1) * total // shares
    row = np.searchsorted(before, exact[:-1], "right") - 1
    unit = exact[:-1] - before[row]
    rounded = np.array([*map(_rounded, unit, stages[row], [cuts] * shares)], np.int64)
    if cuts == 0:
        ends = np.append(before[row] + rounded, total)
        first = np.arange(0, shares, lists)
        most = (ends[np.minimum(first + lists, shares)] - ends[first]).max()
        if most * shares > total * lists + SLACK * shares:
            rounded = unit
    is_next = rounded > stages[row]
    bounds = np.zeros((shares + 1, BOUND), np.int64)
    bounds[:-1, 0] = row + is_next
    bounds[:-1, 1] = np.where(is_next, 0, np.maximum(rounded - 1, 0))
    bounds[-1, 0] = num_rows
    bounds[:, 2] = np.concatenate([[0], np.cumsum(stages)])[bounds[:, 0]] + bounds[:, 1]
    bounds[:, 3] = 2 * np.arange(shares + 1)
    if cuts > 0:
        cut = np.append(cut_of(stages), 1)[bounds[:, 0]]
        bounds[:, 3] = bounds[:, 0] * cuts + bounds[:, 1] // cut
    return bounds


def _rounded(unit: int, num_stages: int, cuts: int) -> int:
    """The end of a slice of a row that is nearest to a unit: of a whole row, or of one
    that is cut."""
    first, end = 0, num_stages + 1
    if cuts > 0:
        cut = int(cut_of(num_stages))
        slice_idx = max(unit - 1, 0) // cut
        first = slice_idx * cut + (slice_idx > 0)
        end = min(end, (slice_idx + 1) * cut + 1)
    return end if 2 * (unit - first) >= end - first else first


def _combined(extents: Any, bounds: Any, cuts: int) -> Iterator[tuple[int, int, int]]:
    if cuts > 0:
        stages = stages_of(extents)
        for row, count in enumerate(-(-stages // cut_of(stages))):
            if count > 1:
                yield row, row * cuts, count
        return
    share = 1
    while share < len(bounds) - 1:
        first = share
        row = bounds[first, 0]
        while bounds[share, 1] > 0 and bounds[share, 0] == row:
            share += 1
        if share > first:
            yield row, 2 * first - 1, 2 * (share - first)
        else:
            share += 1


def slices_of(
    extents: Any, bounds: Any, share: int, cuts: int
) -> Iterator[tuple[int, int, int, int | None]]:
    """Of each slice of a share: the row, the positions of it from the first to before
    the end, and the slot; None for a whole row."""
    row, stage = bounds[share, :2]
    last = tuple(bounds[share + 1, :2])
    while (row, stage) < last:
        begin, length = map(int, extents[row, :2])
        stages, before = stages_of(extents[row]), begin // STAGE
        end = last[1] if row == last[0] else stages
        slot = 2 * share + (stage == 0)
        if cuts > 0:
            cut = cut_of(stages)
            end, slot = min(end, stage + cut), row * cuts + stage // cut
        is_whole = stage == 0 and end == stages
        first = max((before + stage) * STAGE, begin)
        last_one = min((before + end) * STAGE, length)
        yield int(row), int(first), int(last_one), None if is_whole else int(slot)
        row, stage = (row + 1, 0) if end == stages else (row, end)
