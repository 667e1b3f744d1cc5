"""The scheduler service: decides over NATS which request starts when and where, and books its decode slot and pages.

`core` and what it is made of are pure (events in, commands out, clock injected); `shell` connects them to the bus.
"""
