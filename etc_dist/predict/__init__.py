"""Predictions: how long a run takes on several hosts, without running it.

machine.py          workers, links between ranks, and what is assumed of them
simulation.py       the run of one rank: the workers of the CPU backend, with a clock
times.py            how long a task takes: by a trace, or by a model of the GPU
table.py            several numbers of hosts, as a table and a picture
predict_command.py  `etc-dist predict`"""
