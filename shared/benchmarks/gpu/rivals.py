"""Other attention on the same keys and values. Each gets what it likes best: contiguous copies where it has no pages.

What a rival needs may be missing (a compiler, a package): making it raises, and the benchmark's table says why.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional

from weir.kv.geometry import PAGE_TOKENS

Call = Callable[[], object]
_FLASHINFER_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class KvBatch:
    """`keys`, `values` [pages, kv heads, PAGE_TOKENS, head_dim]; `block_tables` int32 [sequences, pages a sequence]."""

    keys: torch.Tensor
    values: torch.Tensor
    block_tables: torch.Tensor
    lengths: list[int]

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies [sequences, kv heads, length, head_dim] of sequences that are all of one length."""
        length = self.lengths[0]
        return self._gather(self.keys, length), self._gather(self.values, length)

    def _gather(self, pages: torch.Tensor, length: int) -> torch.Tensor:
        num_sequences, num_pages = self.block_tables.shape
        rows = pages[self.block_tables.long()].transpose(1, 2)
        rows = rows.reshape(num_sequences, pages.shape[1], num_pages * PAGE_TOKENS, pages.shape[3])
        return rows[:, :, :length].contiguous()


def decode_rivals(queries: torch.Tensor, kv: KvBatch, scale: float) -> Mapping[str, Callable[[], Call]]:
    """`queries` [rows, heads, head_dim]."""
    return {
        "torch SDPA, gathering": lambda: partial(_gather_and_attend, queries[:, :, None], kv, scale),
        "torch SDPA, contiguous": lambda: partial(
            functional.scaled_dot_product_attention,
            queries[:, :, None],
            *kv.contiguous(),
            scale=scale,
            enable_gqa=True,
        ),
        "FlexAttention, contiguous": lambda: _flex(queries[:, :, None], kv, scale, is_causal=False),
        "FlashInfer": lambda: _flashinfer_decode(queries, kv, scale),
    }


def prefill_rivals(queries: torch.Tensor, kv: KvBatch, scale: float) -> Mapping[str, Callable[[], Call]]:
    """`queries` [sequences * length, heads, head_dim]: whole prompts of one length."""
    length = kv.lengths[0]
    batched = queries.reshape(len(kv.lengths), length, *queries.shape[1:]).transpose(1, 2)
    return {
        "torch SDPA, contiguous": lambda: partial(
            functional.scaled_dot_product_attention,
            batched,
            *kv.contiguous(),
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        ),
        "FlexAttention, contiguous": lambda: _flex(batched, kv, scale, is_causal=True),
    }


def _gather_and_attend(queries: torch.Tensor, kv: KvBatch, scale: float) -> torch.Tensor:
    keys, values = kv.contiguous()
    return functional.scaled_dot_product_attention(queries, keys, values, scale=scale, enable_gqa=True)


def _flex(queries: torch.Tensor, kv: KvBatch, scale: float, is_causal: bool) -> Call:
    flex = import_module("torch.nn.attention.flex_attention")
    keys, values = kv.contiguous()
    mask = None
    if is_causal:
        mask = flex.create_block_mask(
            lambda _batch, _head, query, key: query >= key,
            None,
            None,
            queries.shape[2],
            keys.shape[2],
            device=queries.device,
        )
    compiled: Any = torch.compile(flex.flex_attention, dynamic=False)
    return partial(compiled, queries, keys, values, scale=scale, enable_gqa=True, block_mask=mask)


def _flashinfer_decode(queries: torch.Tensor, kv: KvBatch, scale: float) -> Call:
    flashinfer = import_module("flashinfer")
    num_rows, num_heads, head_dim = queries.shape
    device = queries.device
    num_pages = kv.block_tables.shape[1]
    workspace = torch.empty(_FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    wrapper.plan(
        torch.arange(num_rows + 1, dtype=torch.int32, device=device) * num_pages,
        kv.block_tables.flatten(),
        torch.full((num_rows,), (kv.lengths[0] - 1) % PAGE_TOKENS + 1, dtype=torch.int32, device=device),
        num_heads,
        kv.keys.shape[1],
        head_dim,
        PAGE_TOKENS,
        q_data_type=queries.dtype,
        kv_data_type=kv.keys.dtype,
        sm_scale=scale,
    )
    return partial(wrapper.run, queries, (kv.keys, kv.values))
