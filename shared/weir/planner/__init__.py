"""Decides how many prefill and decode workers there should be: from what was seen in the last windows, what is likely a
start time ahead, and a model of what workers can do. It starts, ends and switches nothing itself, and knows no bus.
"""
