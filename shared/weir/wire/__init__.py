"""The gRPC wire format: `v1` holds the code generated from `proto/weir/v1`, never edited by hand.

`proto/generate.py` makes it; a guard test fails when it is not what `proto/` says.
"""
