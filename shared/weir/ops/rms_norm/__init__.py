"""Root mean square normalization, fused with what a linear layer needs next: 8-bit rows.

`weir.ops.quantize` describes the rows.
"""
