"""Makes predictors from request logs: the only room beside models and benchmarks that may use torch and scikit-learn.

What it makes is a file that `weir.policy.predictors` reads with numpy alone; nothing that serves imports this room.
"""
