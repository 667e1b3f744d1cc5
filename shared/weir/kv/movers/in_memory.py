"""In memory: the receiver is a second array, as another host's arena would be. For tests and as a baseline."""

import numpy as np
from numpy.typing import NDArray

from weir.kv.movers.protocol import check_page_ids


class InMemoryMover:
    """`pages`: the sender's, shape [num_pages, page_bytes]; the receiver's are made here, zeroed."""

    def __init__(self, pages: NDArray[np.uint8]) -> None:
        self._pages = pages
        self._receiver_pages = np.zeros_like(pages)

    @property
    def receiver_pages(self) -> NDArray[np.uint8]:
        return self._receiver_pages

    def move(self, page_ids: NDArray[np.int64]) -> int:
        """Copies every byte of the pages."""
        check_page_ids(page_ids, len(self._pages))
        self._receiver_pages[page_ids] = self._pages[page_ids]
        return int(page_ids.size * self._pages.shape[1])
