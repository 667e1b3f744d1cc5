"""The model: where its files are, what they say, and the forward pass that turns a step's plan into tokens.

Only the fp32 path (`torch`) and what runs on devices (`triton`) import torch; what reads a model's files never does.
"""
