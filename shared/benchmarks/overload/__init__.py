"""Far more requests than a stack can serve, on a stack of its own: what is refused how soon, what those that are served
and other tenants notice, and how long it takes until all is as before. `python -m benchmarks.overload`.
"""
