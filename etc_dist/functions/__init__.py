"""Device functions of the library, each with a NumPy body and a CUDA body."""
