"""The decode service: takes over sequences whose prompts are computed and decodes them, all in one batch.

A main of one line: the role is `weir.worker.roles.decode`, the engine `weir.engine`.
"""
