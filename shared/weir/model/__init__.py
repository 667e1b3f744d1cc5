"""The model: where its files are, what they say, and the forward pass that turns a step's plan into tokens.

Only the fp32 path (`weights`, `layers`, `paged_kv`, `step_batch`, `decoder`, `runner`) and what runs on devices
(`triton_*`, `device_pages`, `dummy_device`) import torch; what reads a model's files never does.
"""
