"""The forward pass on a GPU: Triton kernels, library products and CUDA graphs."""
