"""The benchmarks by name. Each module has SUBJECTS: how inputs are made, what is run,
what the rival is, and what bounds the time."""

MODULES = {
    "all_gather_matmul": "collectives",
    "chain": "chain",
    "compile_time": "compile_time",
    "decode": "decode",
    "decode_vllm": "decode_vllm",
    "epilogues": "epilogues",
    "first_token": "first_token",
    "matmul": "matmul",
    "matmul_reduce_scatter": "collectives",
    "mlp": "mlp",
    "moe": "moe",
    "predict": "predict",
    "random_all_gather": "random_sizes",
    "random_matmul": "random_sizes",
    "random_mlp": "random_sizes",
    "random_mlp_ranks": "random_sizes",
    "random_reduce_scatter": "random_sizes",
    "several_gpus": "several_gpus",
    "soak": "soak",
    "step_cost": "host_costs",
    "task_cost": "task_cost",
    "torch_cost": "host_costs",
}
"""The module of each subject."""
