"""gRPC at the edges: how servers and channels are made, and how errors become statuses and errors again.

Every process uses the same limits, keep-alive and error mapping, so that a peer's death is noticed the same way.
"""
