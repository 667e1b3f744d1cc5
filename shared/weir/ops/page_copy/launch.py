"""Launches gather and scatter of whole pages on a GPU (or in Triton's interpreter)."""

import torch
import triton

from weir.ops.checks import check_dtype, check_shape
from weir.ops.page_copy.kernel import page_copy_kernel

_WORD_BYTES = 8
_BLOCK_WORDS = 2048


def gather_pages(pages: torch.Tensor, page_ids: torch.Tensor, buffer: torch.Tensor) -> None:
    """buffer[i] = pages[page_ids[i]]; `pages` and `buffer` uint8 [*, page_bytes], `page_ids` int32 or int64.

    Raises:
        ValueError: a shape, type or stride does not fit, or pages are not whole 8-byte words.
    """
    _copy(pages, buffer, page_ids, items=buffer, is_gather=True)


def scatter_pages(buffer: torch.Tensor, page_ids: torch.Tensor, pages: torch.Tensor) -> None:
    """pages[page_ids[i]] = buffer[i]; as `gather_pages`. Ids must be distinct: a page named twice gets either."""
    _copy(buffer, pages, page_ids, items=buffer, is_gather=False)


def _copy(
    source: torch.Tensor, target: torch.Tensor, page_ids: torch.Tensor, items: torch.Tensor, is_gather: bool
) -> None:
    for name, tensor in (("the copy's source", source), ("the copy's target", target)):
        check_shape(name, tensor, (None, source.shape[-1]))
        check_dtype(name, tensor, torch.uint8)
        misfit = (tensor.stride(0) | tensor.shape[1] | tensor.data_ptr()) % _WORD_BYTES
        if tensor.stride(1) != 1 or misfit:
            raise ValueError(f"{name} has strides {tensor.stride()}: pages must begin and end at multiples of 8 bytes")
    check_shape("page_ids", page_ids, (items.shape[0],))
    check_dtype("page_ids", page_ids, torch.int32, torch.int64)
    num_items, page_bytes = items.shape
    if num_items == 0 or page_bytes == 0:
        return
    num_words = page_bytes // _WORD_BYTES
    page_copy_kernel[num_items, triton.cdiv(num_words, _BLOCK_WORDS)](
        source.view(torch.int64),
        target.view(torch.int64),
        page_ids,
        source.stride(0) // _WORD_BYTES,
        target.stride(0) // _WORD_BYTES,
        num_words,
        GATHER=is_gather,
        BLOCK=_BLOCK_WORDS,
        num_warps=8,
    )
