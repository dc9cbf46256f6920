"""Commands on the CPU backend use one thread for each product."""

import os
import subprocess
import sys
from pathlib import Path

SOURCE = """
import numpy
from etc_dist.models.blas import count_threads, use_one_thread
before = count_threads()
use_one_thread()
x = numpy.ones((64, 64), numpy.float32)
assert (x @ x == 64).all()
print(before, count_threads())
"""


def test_products_are_computed_by_one_thread():
    variables = {
        "OPENBLAS_NUM_THREADS": "2",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-c", SOURCE]
    text = subprocess.check_output(command, env=os.environ | variables, text=True)
    # Empty lists: NumPy was built with another library.
    cores = min(2, len(os.sched_getaffinity(0)))
    assert text in (f"[{cores}] [1]\n", "[] []\n")
