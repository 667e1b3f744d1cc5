"""SiLU of the gate times the up projection, fused with what the down projection needs next: 8-bit rows.

`weir.ops.quantize` describes the rows.
"""
