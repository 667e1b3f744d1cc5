"""Tools that a request lets its model call: what they are, the grammar that holds calls to them, and ids of calls.
Pure.
"""
