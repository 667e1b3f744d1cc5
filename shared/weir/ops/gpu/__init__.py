"""For GPUs: Triton kernels, each with the function that launches it. `weir.ops.reference` says what they compute."""
