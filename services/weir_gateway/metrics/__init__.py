"""The page of metrics: this gateway's figures, those of the processes that it can reach, and vLLM's names for them.

Who counts is elsewhere; here it is gathered when somebody asks.
"""
