"""Benchmarks: fused collectives against cuBLAS and NCCL; see README.md beside this."""
