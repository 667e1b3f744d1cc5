"""What attention in decode and in prefill have in common: one block of context at a time, in an order of operations
that depends on nothing but positions, so that both give the same bits for the same query.
"""
