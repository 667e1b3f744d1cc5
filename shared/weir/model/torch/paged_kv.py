"""Keys and values in pages, seen as tensors without a copy.

A page is `[num_layers, 2, num_kv_heads, block]` (`weir.kv.geometry.PageGeometry`). Three flat views of the same memory
do all the work:

    rows     [num_pages * num_layers * 2 * num_kv_heads * PAGE_TOKENS, head_dim]     one token's value, to write
    columns  [num_pages * num_layers * 2 * num_kv_heads, head_dim, PAGE_TOKENS]      one token's key, to write
    blocks   [num_pages * num_layers * 2 * num_kv_heads, PAGE_TOKENS * head_dim]     one page of one head, to read

Index tensors are made once a step, for layer 0; layer l lies a constant further on.
"""

import numpy as np
import numpy.typing as npt
import torch

from weir.kv.geometry import PAGE_TOKENS, PageGeometry


class PagedKv:
    """Views of `pages`, a C-contiguous uint8 array `[num_pages, page_bytes]` that may be shared memory."""

    def __init__(self, geometry: PageGeometry, pages: npt.NDArray[np.uint8]) -> None:
        if pages.ndim != 2 or pages.shape[1] != geometry.page_bytes:
            raise ValueError(f"pages have shape {pages.shape}, expected [num_pages, {geometry.page_bytes}]")
        if not pages.flags.c_contiguous or not pages.flags.writeable:
            raise ValueError("pages must be C-contiguous and writeable")
        self.num_pages = pages.shape[0]
        self._geometry = geometry
        self._blocks_a_layer = 2 * geometry.num_kv_heads
        values = torch.from_numpy(pages).view(torch.float32)
        self._rows = values.view(-1, geometry.head_dim)
        self._columns = values.view(-1, geometry.head_dim, PAGE_TOKENS)
        self._blocks = values.view(-1, PAGE_TOKENS * geometry.head_dim)

    def row_index(self, page_ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Where tokens go: the rows of layer 0 that would be theirs if keys lay as values do.

        `page_ids`, `offsets` in the page: [tokens] -> [tokens, kv heads].
        """
        first_block = page_ids * (self._geometry.num_layers * self._blocks_a_layer)
        heads = torch.arange(self._geometry.num_kv_heads)
        return (first_block[:, None] + heads) * PAGE_TOKENS + offsets[:, None]

    def block_index(self, block_tables: torch.Tensor) -> torch.Tensor:
        """Where pages lie in layer 0: `block_tables` [sequences, pages] -> [sequences, 2, kv heads, pages]."""
        first_block = block_tables * (self._geometry.num_layers * self._blocks_a_layer)
        heads = torch.arange(self._blocks_a_layer).view(2, self._geometry.num_kv_heads, 1)
        return first_block[:, None, None, :] + heads

    def write(self, layer: int, row_index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """`keys`, `values` [tokens, kv heads, head_dim] into the rows of `row_index`."""
        rows = row_index.view(-1) + layer * self._blocks_a_layer * PAGE_TOKENS
        self._columns[rows // PAGE_TOKENS, :, rows % PAGE_TOKENS] = keys.reshape(-1, self._geometry.head_dim)
        value_rows = rows + self._geometry.num_kv_heads * PAGE_TOKENS
        self._rows.index_copy_(0, value_rows, values.reshape(-1, self._geometry.head_dim))

    def gather(self, layer: int, block_index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of keys and values, each [sequences, kv heads, pages * PAGE_TOKENS, head_dim]."""
        num_sequences, _, num_kv_heads, num_pages = block_index.shape
        found = self._blocks.index_select(0, block_index.view(-1) + layer * self._blocks_a_layer)
        found = found.view(num_sequences, 2, num_kv_heads, num_pages, self._geometry.head_dim, PAGE_TOKENS)
        shape = (num_sequences, num_kv_heads, num_pages * PAGE_TOKENS, self._geometry.head_dim)
        return found[:, 0].transpose(-1, -2).reshape(shape), found[:, 1].reshape(shape)
