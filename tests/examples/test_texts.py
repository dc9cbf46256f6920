"""The README's example runs, and links and file names in texts exist."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16

import etc_dist
from etc_dist.emulate import Emulator
from etc_dist.functions.epilogue import PER_COLUMN, epilogue
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import Graph, ceildiv, graph_function, tile

ROOT = Path(__file__).parents[2]
TEXTS = [ROOT / "README.md", ROOT / "etc_dist/README.md", *ROOT.glob("docs/*.md")]
OTHERS = "CHANGELOG.md", "benchmarks/README.md", "findings/README.md"
LINKED = [*TEXTS, *(ROOT / name for name in OTHERS), *ROOT.glob("benchmarks/log/*.md")]
API = ROOT / "docs/api.md"
COMMANDED = [*TEXTS, ROOT / "benchmarks/README.md", *ROOT.glob("benchmarks/*.py")]
COMMANDED.remove(API)  # docstrings


def test_example_of_the_readme_runs(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", TEXTS[0].read_text(), re.M | re.S)
    (tmp_path / "example.py").write_text(blocks[0])
    command = [
        sys.executable,
        ROOT / "launch/mpirun",
        "-n",
        "2",
        tmp_path / "example.py",
    ]
    process = subprocess.run(
        command,
        env=os.environ | {"ETC_DIST_BACKEND": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert sorted(process.stdout.splitlines()) == [
        f"[rank {r}] rank {r} of 2: y (256, 128), z (512, 64), 128.0" for r in range(2)
    ], process.stderr


def test_readme_is_short():
    assert len(TEXTS[0].read_text().split()) <= 750


@pytest.mark.parametrize("name", ["api", "model_files", "models"])
def test_generated_pages_are_fresh(name):
    script = ROOT / f"docs/make_{name}.py"
    fresh = runpy.run_path(str(script))["page"]()
    page = ROOT / f"docs/{name}.md"
    assert page.read_text() == fresh, f"stale: run {script}"


def test_each_parameter_in_a_docstring_is_an_item_of_the_page():
    markdown = runpy.run_path(str(ROOT / "docs/make_api.py"))["markdown"]
    assert markdown("a: one. b:\ntwo.") == "* `a`: one.\n* `b`: two."


def found(pattern: str, paths: list[Path] = TEXTS) -> list[tuple[Path, str]]:
    """The matches of `pattern` in each of the texts."""
    return [
        (path, match)
        for path in paths
        for match in re.findall(pattern, path.read_text(), re.M)
    ]


def anchors(page: Path) -> set[str]:
    """Those of the headings of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in plain}


def test_links_lead_somewhere():
    dead_links = []
    for path, link in found(r"\]\(([^)\s]+)", LINKED):
        if "://" not in link:
            file, _, anchor = link.partition("#")
            page = path.parent / file if file else path
            if not page.exists() or (anchor and anchor not in anchors(page)):
                dead_links.append((path.name, link))
    assert dead_links == []


def test_files_named_in_texts_exist():
    pairs = found(r"`((?:etc_dist|kernels|launch|docs|examples)/[\w./]+)`")
    assert [pair for pair in pairs if not (ROOT / pair[1]).exists()] == []


def test_attributes_in_texts_exist():
    names = {*dir(etc_dist), "torch"}
    name = r"(?<!from )(?<!import )(?<!-m )(?<![\w./])etc_dist\.(\w+)(?!\S* import)"
    pairs = found(name, [*TEXTS, *ROOT.glob("etc_dist/**/*.py")])
    assert [pair for pair in pairs if pair[1] not in names] == []


def test_commands_in_texts_say_where_their_program_is():
    # Not in PATH after `sh launch/demo`, which fills .venv and nothing else.
    bare = r"(?:^|`)((?:python3?|pytest|mpirun|etc-dist) [^`\n]*)"
    assert found(bare, COMMANDED) == []


def test_advice_names_no_package_that_is_not_published():
    code = [*ROOT.glob("etc_dist/**/*.py"), *ROOT.glob("launch/*")]
    texts = [path for path in (*TEXTS, *code) if path.is_file()]
    assert found(r"install [^\n]*\betc[-_]dist\[", texts) == []


SCALE = """
#pragma once
#include "functions/epilogue.cuh"
namespace etc {
template <class Task>
struct scale : Epilogue {
  static void apply(const Task& task, i32 row, i32 column, float (&v)[8]) {
    float factors[8];
    load_eight(task.template operand<0>().at(column), factors);
    for (int i = 0; i < 8; ++i) v[i] *= factors[i];
  }
};
}
"""


def test_epilogue_of_the_language_page_runs(tmp_path):
    (tmp_path / "scale.cuh").write_text(SCALE)
    page = (ROOT / "docs/language.md").read_text()
    (listing,) = re.findall(r"^```python\n(@epilogue.*?)^```", page, re.M | re.S)
    shapes = [TileShape(64, 64, swapped=True)]
    names = {"FOLDER": tmp_path, "FAMILY": shapes, "Tiles": Tiles, "Graph": Graph}
    names |= {"PER_COLUMN": PER_COLUMN, "ceildiv": ceildiv, "tile": tile}
    names |= {"epilogue": epilogue, "graph_function": graph_function}
    exec(listing, names)
    rng = np.random.default_rng(1)
    x, w = (rng.integers(-3, 4, (r, 72)).astype(bfloat16) for r in (20, 40))
    inputs = {"x": x, "w": w, "factors": np.arange(40, dtype=np.float32) % 3}
    dims = {"m": 20, "n": 40, "k": 72, "shape": 0}
    [outputs] = Emulator(names["scaled"](1)).run([inputs], dims)
    expected = x.astype(np.float32) @ w.astype(np.float32).T * inputs["factors"]
    np.testing.assert_array_equal(outputs["y"], expected.astype(bfloat16))
