"""Run a benchmark, a subject of `subjects/`, on all ranks:

launch/mpirun -n 1 benchmarks/run.py matmul --rows-per-rank 1,64,4096
launch/mpirun -n 1 benchmarks/run.py random_matmul    # sizes from the commit
launch/mpirun -n 1 benchmarks/run.py matmul --help"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import execute
from benchmarks.subjects import MODULES


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in MODULES:
        print(f"{__doc__}\nThe subjects: {', '.join(MODULES)}", file=sys.stderr)
        return 2
    name, *options = arguments
    module = import_module(f"benchmarks.subjects.{MODULES[name]}")
    return execute(module.SUBJECTS[name], name, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
