"""The benchmarks by name. Each module has a SUBJECT: how its inputs are made, what is
run, what the rival is, and what bounds the time."""
