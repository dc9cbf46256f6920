"""Run a benchmark, a subject of `subjects/`, on all ranks:

launch/mpirun -n 1 benchmarks/run.py matmul --rows-per-rank 1,64,4096
launch/mpirun -n 1 benchmarks/run.py matmul --seeded 16    # sizes from the commit
launch/mpirun -n 1 benchmarks/run.py matmul --help
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Subject, execute


def main(arguments: list[str]) -> int:
    folder = Path(__file__).parent / "subjects"
    names = sorted(path.stem for path in folder.glob("[!_]*.py"))
    if not arguments or arguments[0] not in names:
        print(f"{__doc__}\nThe subjects: {', '.join(names)}", file=sys.stderr)
        return 2
    name, *options = arguments
    subject: Subject = import_module(f"benchmarks.subjects.{name}").SUBJECT
    return execute(subject, name, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
