"""Causal attention of chunks of prompts, one chunk a sequence, to keys and values in pages: the sequence's cached ones
and the chunk's own, which are in their pages before.
"""
