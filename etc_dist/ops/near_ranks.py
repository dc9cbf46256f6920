"""The ranks of a host as expressions, and what a task writes or notifies on all of
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

from etc_dist.functions.epilogue import Epilogue, store, store_on_ranks
from etc_dist.ir import EventRef, EventTensor, Expr, Graph, Region, Tensor, span


def near_rank(g: Graph, local: Expr) -> Expr:
    """The rank with the local rank `local` on this rank's host."""
    if g.local_size == g.world_size:
        return local
    return g.rank // g.local_size * g.local_size + local


def local_rank(g: Graph) -> Expr:
    """The number of this rank on its host."""
    return g.rank if g.local_size == g.world_size else g.rank % g.local_size


def every_rank(g: Graph) -> list[Expr]:
    """The ranks of this host, the next one first, this one last."""
    near = g.local_size
    return [near_rank(g, (g.rank + n) % near) for n in range(1, near + 1)]


def peers_of(g: Graph) -> list[Expr]:
    """The same without this rank."""
    return every_rank(g)[:-1]


@overload
def here_and_on(peers: Sequence[Expr], tensor: Tensor, *index: Any) -> list[Region]:
    """For regions."""


@overload
def here_and_on(
    peers: Sequence[Expr], tensor: EventTensor, *index: Any
) -> list[EventRef]:
    """For events."""


def here_and_on(
    peers: Sequence[Expr], tensor: Tensor | EventTensor, *index: Any
) -> Sequence[Region | EventRef]:
    """tensor[index] on this rank, then the same on each of `peers`."""
    return [tensor[index], *(tensor.on(peer)[index] for peer in peers)]


@dataclass(frozen=True)
class TilePlaces:
    """Where the tiles of a matmul are stored: in y, or if y [ranks, ...] is symmetric,
    in this rank's part of y on every rank. rows: of the matmul; y may have more. first:
    the row of y that is the first one, on this rank alone."""

    g: Graph
    y: Tensor
    rows: Expr
    first: Expr | int = 0

    @property
    def shape(self) -> tuple[Expr, Expr]:
        """The rows and columns of the matmul."""
        return self.rows, self.y.shape[-1]

    @property
    def peers(self) -> list[Expr]:
        """The ranks that get the results, too."""
        return peers_of(self.g) if self.y.kind == "symmetric" else []

    @property
    def epilogue(self) -> Epilogue:
        """The epilogue that stores tiles in all places."""
        return store_on_ranks(1 + len(self.peers)) if self.peers else store

    def regions(self, rows: Any, columns: Any) -> list[Region]:
        """What the epilogue writes: y, and the same part on peers."""
        if not self.peers:
            return [self.y[span(self.first + rows.start, rows.size), columns]]
        return here_and_on(self.peers, self.y, self.g.rank, rows, columns)

    def events(self, name: str, shape: Sequence[Expr], tiles: Expr) -> EventTensor:
        """An element is met once each rank that stores into y has stored `tiles`."""
        expects = tiles * (1 + len(self.peers)) if self.peers else tiles
        is_sent = bool(self.peers)
        return self.g.events(name, shape, expects=expects, cross_rank=is_sent)
