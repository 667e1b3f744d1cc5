"""The model's arithmetic: `cpu` compiled by numba, `gpu` by Triton, and `reference` in plain torch.

Importing this package or the reference needs neither Triton nor numba.
"""
