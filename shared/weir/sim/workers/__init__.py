"""Simulated workers, what arrives at them, and hand-offs between them."""
