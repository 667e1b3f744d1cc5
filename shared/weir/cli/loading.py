"""Ctrl-C while modules are imported. Imports nothing heavy itself."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from weir.cli import EXIT_INTERRUPTED


@contextmanager
def ends_quietly() -> Iterator[None]:
    """Ctrl-C ends the program meanwhile: nothing is begun yet, and a KeyboardInterrupt would come out of an extension's
    import as another error. Where it is not heard, as in the background of a script, that stays so."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(EXIT_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
