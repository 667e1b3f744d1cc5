"""The prefill service: computes prompts in chunks, samples each one's first token, hands it to a decode worker.

A thin shell: the engine is `weir.engine`, what a worker is made of is `weir.worker`.
"""
