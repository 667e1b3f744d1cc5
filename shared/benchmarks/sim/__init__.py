"""Experiments on the simulator: each states a claim, compares arms on the same arrivals over several seeds, and keeps
what came out beside what was asked, losses included.

`experiments` has one module an experiment; `python -m benchmarks.sim` runs them.
"""
