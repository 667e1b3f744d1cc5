"""How the bytes of pages come to where their next owner reads them.

A mover moves bytes only; who owns the pages is decided by the transfer service, after `move` has returned.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Mover(Protocol):
    """Between one sender's pages and one receiver's, which have the same size and number."""

    def move(self, page_ids: NDArray[np.int64]) -> int:
        """Makes these pages' bytes readable for the receiver, under the same ids; returns the bytes copied.

        The sender's pages stay as they are and the sender's to keep, also after an error. May be called again.
        Raises IndexError, with nothing moved, for a page that is not there.
        """
        ...


class SharedMemoryMover:
    """Sender and receiver map the same memory, of one host or one GPU: a move is the change of owner that follows."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages

    def move(self, page_ids: NDArray[np.int64]) -> int:
        """Copies nothing; the cost does not depend on the pages' size."""
        check_page_ids(page_ids, self._num_pages)
        return 0


def check_page_ids(page_ids: NDArray[np.int64], num_pages: int) -> None:
    """Raises IndexError unless all ids are in [0, num_pages)."""
    if page_ids.size and not 0 <= page_ids.min() <= page_ids.max() < num_pages:
        raise IndexError(f"page ids {page_ids.min()} to {page_ids.max()}: there are pages 0 to {num_pages - 1}")
