"""What every test has: hypothesis without its deadline of 200 ms an example, which a busy machine misses."""

import gc
from collections.abc import Generator

import pytest
from hypothesis import settings

settings.register_profile("weir", deadline=None)
settings.load_profile("weir")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported, a million objects, is no garbage: to look through it each time takes a tenth of all tests, and
    while it comes a quarter of collecting them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
