"""Makes predictors from request logs: the only room beside models and benchmarks that may use torch and scikit-learn.

What it makes is a file that `weir.policy.predictors` reads with numpy alone; what serves imports this room only for
regressors that it was told to refit, and never torch through it.
"""
