"""Operations: the fused collectives.

matmul_reduce_scatter.py   GEMM + Reduce-Scatter: the graph and the user's object
float_partials.py          its graph with partial sums in fp32
all_gather_matmul.py       AllGather + GEMM
functional.py              both as functions
operation.py               Operation: which program runs a call
argument_table.py          names and shapes of an operation's arrays
order.py                   tile orders
"""
