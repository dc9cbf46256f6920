"""Operations: the fused collectives, and a matrix multiplication.

matmul_reduce_scatter.py   GEMM + Reduce-Scatter: the graph and the user's object
float_partials.py          its graph with partial sums in fp32
all_gather_matmul.py       AllGather + GEMM
all_reduce.py              the sum over ranks on each of them
all_reduce_norm.py         the same with residual and RMSNorm
matmul_all_reduce.py       a GEMM before it
row_sums.py                its rows: the sums, and their norms
sum_steps.py               their parts: one exchange, or two with shares between
exchange_model.py          which of them they have: a model of their times
few_rows.py                both for few rows: gathered first, returned at the end
slots.py                   tiles of partial sums, sent to their owners, and their sum
host_sums.py               that sum over several hosts; host_rows.py: gathering there
matmul.py                  a matrix multiplication on each rank
multiply.py                it in a graph, with k divided for a wave that is not full
tile_model.py              which tiles of one worker it has: a model of their times
matmul_policy.py           the same for tiles of pairs of workers, in decoders
tuning.py                  the constants of the models, by kind of GPU: tuned/
tune.py                    measuring those of one worker; fit_constants.py: their fit
functional.py              the operations as functions
operation.py               Operation: which program runs a call
argument_table.py          names and shapes of an operation's arrays
deterministic.py           which results have the same bits
order.py                   tile orders
"""
