"""For CPUs: loops compiled by numba, their inner parts as LLVM IR (`weir.ops.simd`).

Importing this package, `linear_pack` or `quantized_rows` needs numpy alone. The inputs of a linear layer are quantized
rows: 8-bit integers with one scale for each group of 32; its weights are of 4 or 8 bits, in the same groups. Every
result has the same bits whatever the batch, the number of threads, and the instructions of the machine.
"""
