"""What numbers of one byte cost in quality, by a reference in PyTorch: `python -m benchmarks.quality TEXT`; and the
cases of their kernels on a GPU."""
