"""Real parts for tests: a whole stack of real processes, and a real OTLP receiver that keeps what it is sent.

Nothing in the running system imports this room.
"""
