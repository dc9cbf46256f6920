"""The command `etc-dist port`: what of a model's config.json runs here, and how fast.

port_command.py  the command: its options, and the lines that it prints
faults.py        the fields that are not supported, and the part of the model of each
step_checks.py   the program of the model: compiled, and proved
likeness.py      two layers compared with transformers, on the CPU backend
step_times.py    a prediction of the time of a step, from the bytes that it reads"""
