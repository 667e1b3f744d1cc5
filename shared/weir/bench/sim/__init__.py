"""Experiments on the simulator: each states a claim, compares arms on the same arrivals over several seeds, and keeps
what came out beside what was asked, losses included.

`experiments` has one module an experiment; `weir bench sim` runs them.
"""
