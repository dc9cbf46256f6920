"""Running plans: the CPU backend, the GPU backend, and the traces of both."""
