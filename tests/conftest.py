"""What every test has: hypothesis without its deadline of 200 ms an example, which a busy machine misses."""

import gc

from hypothesis import settings

settings.register_profile("weir", deadline=None)
settings.load_profile("weir")


def pytest_collection_finish() -> None:
    """What was imported, a million objects, is no garbage: to look through it each time takes a tenth of all tests."""
    gc.collect()
    gc.freeze()
