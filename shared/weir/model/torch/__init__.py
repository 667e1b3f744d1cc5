"""The reference forward pass in PyTorch and fp32: what the others are compared with."""
