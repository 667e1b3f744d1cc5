"""The scheduler's pure core: events in, commands out, the clock injected.

The scheduler service runs it behind the bus, the simulator runs the same code against modelled workers.
"""
