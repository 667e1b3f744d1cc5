"""Benchmarks: the step of a worker, the hand-off, and a whole server over HTTP.

They print figures beside the machine's own limits and never assert them; results worth keeping are in `RESULTS.md`.
"""
