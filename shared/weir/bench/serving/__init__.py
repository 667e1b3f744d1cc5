"""Load over HTTP or gRPC on a stack that runs, or on other servers beside it, and what its clients see.

Pure parts say what is sent, when, and what the records come to; `load` and `senders` do the I/O.
"""
