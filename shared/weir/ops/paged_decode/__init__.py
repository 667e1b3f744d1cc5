"""Attention of sequences that bring one query each to keys and values in pages, which are read where they lie.
A sequence's context is split into blocks of a fixed size, that threads share; its result never depends on them.
"""
