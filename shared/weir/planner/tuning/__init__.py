"""Tunes the bounds that workers' steps have, on a canary first: one bound at a time, kept only where windows beside the
other workers prove it better. It changes nothing itself, and knows no bus.
"""
