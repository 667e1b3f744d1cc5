"""Gather and scatter of whole pages in plain torch."""

import torch


def gather_pages(pages: torch.Tensor, page_ids: torch.Tensor, buffer: torch.Tensor) -> None:
    """buffer[i] = pages[page_ids[i]]; both [*, page_bytes] uint8."""
    buffer.copy_(pages[page_ids.long()])


def scatter_pages(buffer: torch.Tensor, page_ids: torch.Tensor, pages: torch.Tensor) -> None:
    """pages[page_ids[i]] = buffer[i]; both [*, page_bytes] uint8, ids distinct."""
    pages[page_ids.long()] = buffer
