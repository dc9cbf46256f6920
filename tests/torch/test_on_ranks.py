"""The operations, modules, example and page on two ranks of torchrun: of one job, since
starting torch takes seconds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

FILE = Path(__file__).with_name("on_ranks.py")
ROOT = FILE.parents[2]
CHECKS = re.findall(r"^def (check_\w+)\(", FILE.read_text(), re.M)
EXAMPLE = ROOT / "examples" / "torch_tensor_parallel.py"
PAGE = (ROOT / "docs" / "torch.md").read_text()
LISTINGS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
RANKS = 2


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of ranks of the CPU backend, which run the checks, the example and the page."""
    folder = tmp_path_factory.mktemp("on_ranks")
    job, page = folder / "job.py", folder / "listings.py"
    page.write_text("\n".join(LISTINGS))
    files = [*map(str, (FILE, EXAMPLE, page))]
    job.write_text(
        f"import runpy\nfor file in {files}:\n"
        "    runpy.run_path(file, run_name='__main__')\nprint('all ended')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {"OMP_NUM_THREADS": "1", "ETC_DIST_BACKEND": "cpu"}
    return subprocess.run(
        [*command, f"--nproc-per-node={RANKS}", job],
        env=os.environ | environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    ).stdout


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_ranks(check, output):
    for rank in range(RANKS):
        assert f"rank {rank}: {check} passed" in output, output


def test_example_passes(output):
    assert "passed" in output.splitlines(), output
    assert "2 ranks, cpu, gloo" in output


def test_listings_of_the_page_run(output):
    assert len(LISTINGS) == 4
    assert output.splitlines().count("all ended") == RANKS, output
