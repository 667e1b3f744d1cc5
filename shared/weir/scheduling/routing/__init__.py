"""What it costs to place a request: at each worker, with what can be fetched from other hosts, and over two hosts.

Also how quick the links between hosts are, by which that is told.
"""
