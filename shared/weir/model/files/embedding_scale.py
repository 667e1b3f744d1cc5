"""What Gemma's embeddings are multiplied with."""

import math
from typing import Literal

import numpy as np

FloatType = Literal["float32", "float16", "bfloat16"]


def embedding_scale(hidden_size: int, kept_as: FloatType | None) -> float:
    """The square root of `hidden_size`, rounded to the type of the weights, as transformers has it: in bfloat16 34 for
    1152. None, for quantized weights: as for float32."""
    root = np.float32(math.sqrt(hidden_size))
    if kept_as == "float16":
        return float(np.float16(root))
    if kept_as == "bfloat16":
        bits = root.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF0000)
        return float(rounded.view(np.float32))
    return float(root)
