"""The transfer service: owns the pages of its host, leases them to workers and passes sequences from one to another.

A worker that breaks its lease is killed, and only when it has exited does anything of its lease become free.
"""
