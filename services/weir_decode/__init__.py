"""The decode service: takes over sequences whose prompts are computed and decodes them, all in one batch.

A thin shell: the engine is `weir.engine`, what a worker is made of is `weir.worker`.
"""
