"""What numbers of one byte cost in quality, by a reference in PyTorch: `python -m benchmarks.quality TEXT`."""
