"""The last requests, as their gateway remembers them: the timeline of each, and a bounded store of those that ended."""
