"""The control bus: subjects, typed messages and two implementations, NATS and in memory, under one contract test.

Control only: no pages, no prompts, no tokens.
"""
