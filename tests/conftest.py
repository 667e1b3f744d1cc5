"""What every test has: hypothesis without its deadline of 200 ms an example, which a busy machine misses."""

from hypothesis import settings

settings.register_profile("weir", deadline=None)
settings.load_profile("weir")
