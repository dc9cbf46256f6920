"""Sums over ranks of rows that every rank gets: an all-reduce of the rows of a matrix,
which may be the result of a matmul, and may be followed by residual and RMSNorm."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from etc_dist.functions.add_ranks_norm import add_ranks_norm
from etc_dist.functions.flags import add_flagged_norm
from etc_dist.functions.rms_norm import copy_norm
from etc_dist.functions.share_sum import share_sum
from etc_dist.ir import (
    EventRef,
    EventTensor,
    Expr,
    Graph,
    Tensor,
    ceildiv,
    equal,
    maximum,
    minimum,
    select,
    span,
)
from etc_dist.ir.function import TENSOR
from etc_dist.ir.tensor import Tile
from etc_dist.ops.exchange_model import ONE_SHOT, TWO_SHOT
from etc_dist.ops.multiply import Matrix, RowEvents
from etc_dist.ops.near_ranks import every_rank, local_rank, near_rank
from etc_dist.ops.sum_steps import exchange_flagged, exchange_hosts, whole


class Norm(NamedTuple):
    """What follows a sum: residual [rows, columns] is added to it into `total`, whose
    RMSNorm with `gain` [columns] is the result."""

    residual: Tensor
    gain: Tensor
    total: Tensor
    eps: float


@dataclass(frozen=True)
class RowSums:
    """y [rows, 8 * vectors]: the sums over ranks of the rows of x, or their norms.

    piece: vectors of a row that a task transfers or adds. ready: the events of blocks
    of rows of x, unless it is an input. lane: of tasks that transfer and add."""

    g: Graph
    x: Matrix
    y: Tensor
    norm: Norm | None
    piece: Expr
    ready: RowEvents | None = None
    lane: str = TENSOR

    def add(self, algorithm: Expr, num_tasks: Expr | None = None) -> None:
        """Add all steps, of the algorithm with this position in ALGORITHMS; over
        several hosts always of two exchanges, on one host with a norm. num_tasks: as
        for `add_flagged_sum`: at least the rows, or 0."""
        g, rows = self.g, self.x.shape[0]
        pieces = self.pieces
        if g.local_size < g.world_size:
            self._add_two_shot(rows, pieces)
            return
        if num_tasks is not None:
            self._add_flagged(num_tasks)
        once = g.let("rows_once", select(equal(algorithm, ONE_SHOT), rows, 0))
        self._add_one_shot(once, pieces)
        self.add_two_shot(algorithm)

    def add_two_shot(self, algorithm: Expr) -> None:
        """Add two exchanges on one host, for calls with this algorithm."""
        twice = select(equal(algorithm, TWO_SHOT), self.x.shape[0], 0)
        self._add_two_shot(self.g.let("rows_twice", twice), self.pieces)

    @property
    def columns(self) -> Expr:
        """Of x."""
        return self.x.shape[1]

    @property
    def width(self) -> Expr:
        """The elements of a piece."""
        return 8 * self.piece

    @cached_property
    def pieces(self) -> Expr:
        """The number of pieces of a row."""
        return self.g.let("row_pieces", ceildiv(self.columns, self.width))

    def _in_row(self, c: Expr) -> Tile:
        """Piece c of a row."""
        start = c * self.width
        return span(start, minimum(self.width, self.columns - start))

    def _flat(self, r: Expr, c: Expr) -> tuple[Tile]:
        """The same of row r among all elements."""
        part = self._in_row(c)
        return (span(r * self.columns + part.start, part.size),)

    def _waits(self, r: Expr) -> list[EventRef]:
        return [] if self.ready is None else [self.ready.at(r)]

    def _add_flagged(self, num_tasks: Expr) -> None:
        """Each rank stores its rows on its peers as flagged words, and normalises the
        sums as they arrive."""
        g, dtype, norm, rows = self.g, self.x.tensor.dtype, self.norm, self.x.shape[0]
        assert norm is not None and self.ready is None
        flagged_rows = g.let("flagged_rows", minimum(rows, num_tasks))
        (r,) = grid = g.grid(r=num_tasks)
        row = span(r, 1), slice(None)
        words, arrival_event = exchange_flagged(
            g,
            grid,
            self.x.at(*row),
            row,
            (flagged_rows, self.columns),
            is_row=True,
        )
        g.call(
            add_flagged_norm(dtype, norm.eps),
            grid,
            reads=[self.x.at(*row), words[:, *row], norm.residual[row], norm.gain[:]],
            writes=[norm.total[row], self.y[row]],
            waits=[arrival_event],
        )

    def _add_one_shot(self, rows: Expr, pieces: Expr) -> None:
        """Each rank stores its rows on all ranks, and normalises the sums of all."""
        g, dtype, norm = self.g, self.x.tensor.dtype, self.norm
        assert norm is not None
        slots = g.symmetric("slots", (g.world_size, rows, self.columns), dtype)
        expects = g.world_size * pieces
        slot_events = g.events("arrived", (rows,), expects=expects, cross_rank=True)
        r, c = grid = g.grid(r=rows, c=pieces)
        ranks = every_rank(g)
        g.call(
            share_sum(dtype, 1, g.world_size, lane=self.lane),
            grid,
            name="push_parts",
            reads=[self.x.at(r, self._in_row(c))],
            writes=[slots.on(rank)[g.rank, r, self._in_row(c)] for rank in ranks],
            waits=self._waits(r),
            notifies=[slot_events.on(rank)[r] for rank in ranks],
        )
        (r,) = grid = g.grid(r=rows)
        row = span(r, 1), slice(None)
        g.call(
            add_ranks_norm(dtype, norm.eps),
            grid,
            reads=[slots[:, *row], norm.residual[row], norm.gain[:]],
            writes=[norm.total[row], self.y[row]],
            waits=[slot_events[r]],
        )

    def _add_two_shot(self, rows: Expr, pieces: Expr) -> None:
        """Each rank of a host adds the rows of its share, every so many, and stores the
        sums on all ranks of the host."""
        g, near, local = self.g, self.g.local_size, local_rank(self.g)
        num_own = share = g.let("share", ceildiv(rows, near))
        sums, ready = self._scatter(rows, share, pieces)
        dtype = self.x.tensor.dtype
        if near < g.world_size:
            unit = self.columns
            # NOTE: messages to other hosts have no conditions.
            num_own = g.let("own_rows", maximum(0, ceildiv(rows - local, near)))
            sums, ready = exchange_hosts(
                g,
                sums,
                ready,
                (num_own, lambda i: (span(i * unit, unit),)),
                (pieces, self._flat),
            )
            dtype = "float32"
        all_rows, gather_events = self._gather(rows, pieces)
        i, c = grid = g.grid(i=num_own, c=pieces)
        ranks, norm = every_rank(g), self.norm
        count = near if near == g.world_size else g.world_size // near
        # The last row of a share may be beyond the end: then the task has no element.
        is_row, r = i * near + local < rows, minimum(i * near + local, rows - 1)
        part = self._in_row(c)
        part = span(part.start, select(is_row, part.size, 0))
        in_share = span(i * self.columns + part.start, part.size)
        residual = [] if norm is None else [norm.residual[r, part]]
        function = share_sum(
            dtype,
            count,
            near,
            result=self.x.tensor.dtype,
            has_residual=norm is not None,
            lane=self.lane,
        )
        g.call(
            function,
            grid,
            name="add_share",
            reads=[whole(sums, in_share), *residual],
            writes=[all_rows.on(rank)[r, part] for rank in ranks],
            waits=[ready[i].when(is_row)],
            notifies=[gather_events.on(rank)[r].when(is_row) for rank in ranks],
        )
        self._finish(rows, pieces, all_rows, gather_events)

    def _scatter(
        self, rows: Expr, share: Expr, pieces: Expr
    ) -> tuple[Tensor, EventTensor]:
        """Each rank of the host gets the parts of the rows of its share."""
        g, near, local = self.g, self.g.local_size, local_rank(self.g)
        dtype = self.x.tensor.dtype
        shape = near, share * self.columns
        parts = g.symmetric("share_parts", shape, dtype)
        expects = near * pieces
        scattered = g.events("scattered", (share,), expects=expects, cross_rank=True)
        i, c = grid = g.grid(i=rows, c=pieces)
        # To the next ranks first, so that no rank gets all rows at once. But rows of a
        # matmul are sent in the order in which they are computed.
        r = i if self.ready is not None else (i + local + 1) % rows
        to = near_rank(g, r % near)
        g.call(
            share_sum(dtype, 1, lane=self.lane),
            grid,
            name="scatter_parts",
            reads=[self.x.at(r, self._in_row(c))],
            writes=[parts.on(to)[local, *self._flat(r // near, c)]],
            waits=self._waits(r),
            notifies=[scattered.on(to)[r // near]],
        )
        return parts, scattered

    def _gather(self, rows: Expr, pieces: Expr) -> tuple[Tensor, EventTensor]:
        """Memory and events for the sums of all rows."""
        g = self.g
        all_rows = g.symmetric("gathered", (rows, self.columns), self.x.tensor.dtype)
        gather_events = g.events(
            "gathered_row", (rows,), expects=pieces, cross_rank=True
        )
        return all_rows, gather_events

    def _finish(
        self, rows: Expr, pieces: Expr, all_rows: Tensor, gather_events: EventTensor
    ) -> None:
        """Copy, or normalise, the sums of all rows."""
        g, dtype, norm = self.g, self.x.tensor.dtype, self.norm
        if norm is None:
            r, c = grid = g.grid(r=rows, c=pieces)
            g.call(
                share_sum(dtype, 1, lane=self.lane),
                grid,
                name="copy_rows",
                reads=[all_rows[r, self._in_row(c)]],
                writes=[self.y[r, self._in_row(c)]],
                waits=[gather_events[r]],
            )
            return
        (r,) = grid = g.grid(r=rows)
        row = span(r, 1), slice(None)
        g.call(
            copy_norm(dtype, norm.eps),
            grid,
            reads=[all_rows[row], norm.gain[:]],
            writes=[norm.total[row], self.y[row]],
            waits=[gather_events[r]],
        )
