"""The kernels beside the machine's limits: those of the CPU are here, those of a GPU in `benchmarks.gpu`."""
