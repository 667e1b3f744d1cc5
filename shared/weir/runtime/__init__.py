"""The spine of every process: configuration, logs, traces, the gRPC server's life from bind to drain.

Also the supervisor behind `weir up`, which starts, watches, restarts and ends those processes on one machine.
"""
