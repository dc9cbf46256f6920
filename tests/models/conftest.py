"""Fixtures: a program for decoders of each size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import etc_dist
from etc_dist import Program, World
from etc_dist.models.decoder import decoder_graph
from etc_dist.models.sizes import DecoderSizes
from tests.models.steps import SHAPES

MOST_RANKS = 4
"""The models of these tests can be divided by no more."""


@pytest.fixture(autouse=True)
def few_ranks(request: pytest.FixtureRequest) -> None:
    names = {"world", "one_rank"}.intersection(request.fixturenames)
    if names and request.getfixturevalue("world").size > MOST_RANKS:
        pytest.skip(f"for at most {MOST_RANKS} ranks")


@pytest.fixture(scope="module")
def decoder_of(world: World) -> Iterator[Callable[[DecoderSizes], Program]]:
    """The programs are closed after the module's tests."""
    programs: dict[Any, Program] = {}

    def decoder_of(sizes: DecoderSizes) -> Program:
        if sizes not in programs:
            graph = decoder_graph(1, sizes=sizes, shapes=SHAPES, best_columns=64)
            programs[sizes] = etc_dist.compile(graph, world)
        return programs[sizes]

    yield decoder_of
    for program in programs.values():
        program.close()
