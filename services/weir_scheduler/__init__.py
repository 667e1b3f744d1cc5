"""The scheduler service: decides over NATS which request starts when and where, and reserves its decode slot and pages.

The decisions are `weir.scheduling`'s; `shell` connects them to the bus, `leadership` says who may decide.
"""
