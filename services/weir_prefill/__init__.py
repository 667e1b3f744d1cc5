"""The prefill service: computes prompts in chunks, samples each one's first token, hands it to a decode worker.

A main of one line: the role is `weir.worker.roles.prefill`, the engine `weir.engine`.
"""
