"""`make gpu`, or `PYTHONPATH=shared python3 -m benchmarks.gpu`: tests and figures of the GPU path.

Runs where little more than torch and Triton is installed: nothing here imports what only Weir's own dependencies bring.
"""
