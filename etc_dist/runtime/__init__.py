"""Running plans: the CPU backend, the GPU backend, and the traces of both.

build.py            source to cubin by NVRTC; includes.py: its headers;
                    build_advice.py: what to correct after a failure;
                    far_link.py: with NVSHMEM's device code
bundle.py           programs and proofs in a folder
gpu.py              the GPU backend: memory of a program and launches
occupancy.py        how many workers a GPU holds
argument_block.py   the arguments of a kernel launch
region_checks.py    rows and regions that GPUs refuse
memory_plan.py      the offsets of tensors and counters
program_memory.py   memory on GPUs, which grows, also after a capture
tensor_map.py       descriptors of bulk copies
arrays.py           the caller's arrays; array_checks.py: whether they fit a call
stream.py           the caller's streams
waiting.py          waits for a GPU, with a limit
last_run.py         the interface of a backend; the end of a program's last run on all
                    ranks, and its error
device_faults.py    fault records of the device, as errors
run_check.py        runs verified with their data
trace.py            traces; timeline.py: their picture; trace_sums.py: the time by call;
                    trace_turn.py: a turn of a loop; trace_file.py: traces from files
cpu/                the same plan in NumPy"""
