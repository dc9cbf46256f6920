#!/usr/bin/env bash
# mpi4py maps float16 arrays to an MPI type, also in reductions. A bfloat16 array cannot
# be sent at all, and mpi4py's own name for the type is the null type under MPICH.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
    numpy==2.4.6 ml_dtypes==0.6.0 mpi4py==4.1.2 mpich==5.0.2
cat >"$folder/ranks.py" <<'PYTHON'
import sys

import ml_dtypes
import mpi4py
import numpy as np
from mpi4py import MPI

comm, found = MPI.COMM_WORLD, {}
for dtype in (np.float16, ml_dtypes.bfloat16):
    x, y = np.ones(3, dtype), np.zeros(3, dtype)
    for name, call in (
        ("Allreduce", lambda: comm.Allreduce(x, y)),
        ("Sendrecv", lambda: comm.Sendrecv(x, comm.rank, recvbuf=y, source=comm.rank)),
    ):
        try:
            call()
            found[np.dtype(dtype).name, name] = float(y[0])
        except Exception as error:
            found[np.dtype(dtype).name, name] = type(error).__name__
is_null = MPI.BFLOAT16_T == MPI.DATATYPE_NULL
if comm.rank == 0:
    print("mpi4py", mpi4py.__version__, MPI.Get_library_version().split("\n")[0])
    print("expected: both dtypes alike")
    print("seen:    ", found, "BFLOAT16_T is null:", is_null)
sys.exit(
    list(found.values()) != [2.0, 1.0, "BufferError", "BufferError"] or not is_null
)
PYTHON
"$folder/venv/bin/mpiexec" -n 2 "$folder/venv/bin/python" "$folder/ranks.py"
