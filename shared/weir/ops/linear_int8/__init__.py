"""Linear layers over 4-bit or 8-bit weights and 8-bit rows, both in groups of 32 along the inputs.

`pack` arranges weights once at load, `weir.ops.quantize` makes the rows, `cpu` multiplies; every result has the same
bits whatever the batch, the number of threads and the instructions of the machine.
"""
