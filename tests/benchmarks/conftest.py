"""Records of the tests of the benchmarks."""

from __future__ import annotations

from typing import Any

from benchmarks.records import KINDS, Record, parse

VALUES: dict[str, Any] = {
    "op": "matmul_reduce_scatter",
    "world_size": 8,
    "device": "NVIDIA H200",
    "driver": "580.159",
    "cuda": "13.0",
    "backend": "cuda",
    "path": "static schedule, cuda backend, 132 workers",
    "commit": "0123456789abcdef-dirty",
    "date": "2026-01-02T03:04:05+00:00",
    "model": "llama3-8b",
    "M": 8192,
    "N": 4096,
    "K": 1792,
    "dtype": "bfloat16",
    "schedule": "static",
    "ours_ms": 0.2,
    "baseline_ms": 0.3,
    "gemm_ms": 0.16,
    "collective_ms": 0.14,
    "wire_ms": 0.15,
    "limit_ms": 0.16,
    "of_limit": 0.8,
    "speedup": 2.0,
    "error": 0.00235,
    "baseline_error": 0.00404,
    "bitwise_equal": True,
    "repeats": 21,
    "ours_spread_ms": [0.19, 0.21],
    "host_us": {"cupy": 9.0},
    "protocol": "text",
    "baseline": "cuBLAS, NCCL",
    "context": 512,
}


def record(op: str = "matmul_reduce_scatter", **changes: Any) -> Record:
    """A record of a kind: fields of VALUES, and 1 for others, but for `changes`."""
    fields = {name: VALUES.get(name, 1) for name in KINDS[op].required}
    return parse({**fields, "op": op, **changes})
