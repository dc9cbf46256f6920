"""Fixtures: a world that checks runs, and programs in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import etc_dist
from etc_dist import Program, World
from etc_dist.ir import GraphFunction


@pytest.fixture
def checked(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The world, where runs are checked on every backend."""
    monkeypatch.setattr(world, "settings", replace(world.settings, verify="data"))
    return world


@pytest.fixture
def unverified(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The world, where programs run without a proof."""
    monkeypatch.setattr(world, "settings", replace(world.settings, verify=0))
    return world


@pytest.fixture
def make_program(world: World) -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def make_program(graph: GraphFunction, **options: Any) -> Program:
        programs.append(etc_dist.compile(graph, world, **options))
        return programs[-1]

    yield make_program
    for program in programs:
        program.close()
