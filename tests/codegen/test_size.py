"""The size of generated text."""

from __future__ import annotations

import re

import pytest

from etc_dist.codegen import generate
from etc_dist.codegen.members import WIDTH
from etc_dist.models.decoder import decoder_for
from etc_dist.models.library import DECODERS, library_programs
from etc_dist.ops.matmul import matmul_graph
from etc_dist.schedule import SCHEDULES, Plan, schedule_dynamic, schedule_static
from tests.graphs.mixtures import moe_graph

LIMITS = {"matmul_graph": 100, "static": 900, "dynamic": 1500}
"""The most lines of a graph's text, or of texts of a schedule. A matmul has three calls
of about 17 lines: parts of k, whole tiles and sums of parts. A decoder with a mixture
and dense layers has 27 calls."""
EXPERTS = {"experts": 128, "top_k": 8, "parallel": "expert"}


def check_size(plan: Plan) -> None:
    """Fail if the text of a plan exceeds a limit."""
    name, lines = plan.graph.name, generate(plan).text.splitlines()
    assert len(lines) <= LIMITS.get(name, LIMITS[plan.schedule]), name
    assert max(map(len, lines)) <= WIDTH, name


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("model", ["gpt-oss-20b", "olmo-2-32b of 4"])
def test_texts_of_decoders_are_short(model, schedule):
    check_size(SCHEDULES[schedule](decoder_for(schedule, *DECODERS[model])))


def test_texts_of_operations_are_short():
    check_size(schedule_static(matmul_graph(1)))
    check_size(schedule_dynamic(moe_graph(4, **EXPERTS)))


@pytest.mark.exhaustive
def test_texts_of_the_library_are_short():
    for _, plan in library_programs():
        check_size(plan)


def test_the_text_has_no_loops_and_selects_by_number_alone():
    text = generate(schedule_dynamic(moe_graph(4, **EXPERTS))).text
    assert not re.search(r"\b(for|while|switch|goto)\b", text)
    assert len(re.findall(r"ETC_ROW\(\d+\) ", text)) > 50
    conditions = re.findall(r"\bif\b.{18}", text)
    assert len(conditions) > 10
    assert [
        c for c in conditions if not re.match(r"if (constexpr )?\(n == \d", c)
    ] == []
