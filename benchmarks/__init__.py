"""Benchmarks: fused collectives against cuBLAS and NCCL; see benchmarks/README.md."""
