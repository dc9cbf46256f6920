"""Operations: the fused collectives, and a matrix multiplication.

matmul_reduce_scatter.py   GEMM + Reduce-Scatter: the graph and the user's object
all_gather_matmul.py       AllGather + GEMM
all_reduce.py              the sum over ranks on each of them
all_reduce_norm.py         all-reduce with residual and RMSNorm
matmul_all_reduce.py       GEMM + All-Reduce, also with residual and RMSNorm
row_sums.py                all-reduces of rows, and their norms
tile_sums.py               all-reduces of tiles, while a matmul runs
sum_steps.py               steps of all-reduces: one exchange, or two with shares
near_ranks.py              the ranks of a host, and what is stored on all of them
exchange_model.py          the choice of such steps: a model of their times
few_rows.py                few rows: gathered first, returned by strips of columns
rank_tiles.py              a GEMM of all ranks' rows, in tiles with rows of one rank
return_rows.py             partial sums of many rows, returned to their owners
host_sums.py               that sum over several hosts; host_rows.py: gathering there
matmul.py                  a matrix multiplication on each rank
multiply.py                a GEMM in a graph, with split-K for a wave that is not full
quantized_rows.py          activations in float8: rows quantized before a GEMM
tile_model.py              the choice of tiles of one worker: a model of their times
tuning.py                  the constants of the models, by kind of GPU: tuned/
tune.py                    measuring those of one worker; fit_constants.py: their fit
functional.py              the operations as functions
operation.py               Operation: which program runs a call
argument_table.py          names and shapes of an operation's arrays
scaled_weight.py           float8 weights with scales, and making them
deterministic.py           which results have the same bits
tile_order.py              tile orders
"""
