"""The forward pass on CPUs in int8: packed weights, threads, and one compiled function a slice. No torch."""
