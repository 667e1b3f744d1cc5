"""The model's arithmetic, one folder an op: `reference.py` in plain torch or numpy, `kernel.py` and `launch.py` for
GPUs (Triton), `cpu.py` for CPUs (numba).

Importing this package or a reference needs neither Triton nor numba.
"""
