"""Verification: proof that a plan is correct at one shape, before it runs.

verify.py           verify: all checks, over one enumeration
enumerate_plan.py   a plan at a shape: every task with its waits and accesses
enumeration.py      the arrays that hold them
progress.py         counts of notifications, and the run of all queues
happens_before.py   the happens-before relation of tasks
task_classes.py     classes of tasks that the order does not distinguish
equal_rows.py       equal rows of a table
boxes.py            all accesses of a tensor, and those of them that differ
cells.py, races.py  accesses of one place that nothing orders
flagged_words.py    words that carry their epoch
far.py              memory of other hosts
operands.py         the operands of a task: their sizes, and regions that are apart
coverage.py         elements written twice or never
loaded_accesses.py  loads in index expressions, as reads
surplus.py          grids with a loaded extent, for all data
index_range.py      index arithmetic that may exceed 32 bits
unchecked.py        the parts that a proof leaves out
violations.py       all violations of a plan, as one error
proof.py            proofs on record"""
