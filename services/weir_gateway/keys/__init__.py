"""Requests with an idempotency key: sent again they go on, at this gateway or at another one, or are computed again to
the same tokens. Who has a key is decided in the bus's bucket; what this gateway has of it is kept here for a while.
"""
