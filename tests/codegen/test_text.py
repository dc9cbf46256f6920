"""Golden texts of graphs, plans and sources, equal on every rank."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from etc_dist.codegen import generate
from etc_dist.codegen.names import dim_name
from etc_dist.schedule import schedule_static
from tests.graphs.written import DIMS, GRAPHS

NAMES = sorted(GRAPHS)
WORKERS = 132
ROOT = Path(__file__).parents[2]


def all_texts() -> str:
    """The texts that every rank must generate alike."""
    plans = {name: schedule_static(graph) for name, graph in GRAPHS.items()}
    texts = [p.graph.show() + p.show(WORKERS, **DIMS[n]) for n, p in plans.items()]
    return "\n".join(texts + [generate(plan).text for plan in plans.values()])


@pytest.mark.parametrize("name", NAMES)
def test_graph(name, golden):
    golden(GRAPHS[name].show())


@pytest.mark.parametrize("name", NAMES)
def test_plan(name, golden):
    golden(schedule_static(GRAPHS[name]).show(WORKERS, **DIMS[name]))


@pytest.mark.parametrize("name", NAMES)
def test_source(name, golden):
    golden(generate(schedule_static(GRAPHS[name])).text)


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_another_process_generates_the_same_text(hash_seed):
    code = (
        "import hashlib\nfrom tests.codegen.test_text import all_texts\n"
        "print(hashlib.sha256(all_texts().encode()).hexdigest())"
    )
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    expected = hashlib.sha256(all_texts().encode()).hexdigest()
    assert process.stdout == expected + "\n", process.stderr


def test_equal_plans_give_equal_sources():
    assert all_texts() == all_texts()
    graph = GRAPHS["user"]
    first, second = (generate(schedule_static(graph)) for _ in range(2))
    assert first == second
    assert first.digest == hashlib.sha256(first.text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", NAMES)
def test_every_dim_is_an_argument_of_the_source(name):
    source, graph = generate(schedule_static(GRAPHS[name])), GRAPHS[name]
    symbols = (*graph.dims, *(s for s, _ in graph.derived))
    names = [dim_name(s.name) for s in symbols]
    assert set(names) <= set(source.arguments.integers)
    struct = source.text[: source.text.index("static_assert")]
    assert all(re.search(rf"\b{name}[,;]", struct) for name in names)


def test_a_plan_that_was_shown_at_a_shape_gives_the_same_source():
    plan = schedule_static(GRAPHS["all_gather_matmul"])
    before = generate(plan).text
    for rows in (8, 1000):
        dims = DIMS["all_gather_matmul"] | {"rows": rows, "n": rows, "k": rows}
        plan.show(WORKERS, **dims)
        plan.graph.environment(dims, 1)
    assert generate(plan).text == before


def test_tracing_changes_one_constant():
    plan = schedule_static(GRAPHS["user"])
    plain, traced = (generate(plan, trace=t) for t in (False, True))
    assert traced.text.replace(", kTrace = 1", "") == plain.text != traced.text
    assert (plain.traced, traced.traced) == (False, True)
