"""Work that begins before anybody waits for it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


def begin(work: Callable[[], _T], name: str) -> "Future[_T]":
    """Starts `work` in a thread of its own. The thread is a daemon: a process that ends early does not wait for it."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets the error
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
