"""Where workers compute.

    cpu           in compiled kernels; pages lie in the segment, beside the tables
    cuda          in Triton kernels on GPU 0; pages lie in the GPU's memory
    interpreter   in the same Triton kernels, interpreted on the CPU; pages lie in memory of the host that is made,
                  handed out and mapped as a GPU's is. Slow: it runs the GPU path on machines without a GPU, for tests

Wherever pages lie, the tables and the sequence records are in the segment.
"""

from typing import Literal

Device = Literal["cpu", "cuda", "interpreter"]
"""Of all workers of a host: they share its arena."""
