"""What the Triton cases share. They run on the CPU in Triton's interpreter, or on a GPU: see `test_triton_*.py`."""

import os
from dataclasses import dataclass

import pytest
import torch

from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.ops.gpu.attention import DeviceScoring

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu") if IS_INTERPRETED else torch.device("cuda", 0)
COMPUTE_CAPABILITY = 90 if IS_INTERPRETED else 10 * torch.cuda.get_device_capability()[0]

# (dtype, atol, rtol): against a reference that computes in fp32 and rounds once
TOLERANCES = [
    pytest.param(torch.float32, 2e-5, 2e-5, id="fp32"),
    pytest.param(torch.float16, 2e-3, 2e-3, id="fp16"),
    pytest.param(torch.bfloat16, 1.6e-2, 1.6e-2, id="bf16"),
]

# the interpreter has no bf16 matrix product
DOT_TOLERANCES = TOLERANCES[:2] if IS_INTERPRETED else TOLERANCES


@dataclass(frozen=True)
class Heads:
    """`num_heads` query heads over `num_kv_heads` key heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def scoring(self) -> DeviceScoring:
        return DeviceScoring(self.scale, self.window, self.softcap)

    @property
    def bounds(self) -> tuple[float, int | None, float | None]:
        """As the reference has them."""
        return self.scale, self.window, self.softcap

    def __str__(self) -> str:
        return f"{self.num_heads}on{self.num_kv_heads}x{self.head_dim}"


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32).to(dtype).to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Full of NaN: an element that nobody writes, or that is read unwritten, shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def ints(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@dataclass(frozen=True)
class Cache:
    """`pages` [pages, layers, 2, kv heads, PAGE_TOKENS, head_dim], NaN wherever no sequence has a token. Layer 1 is the
    one in use: its views have the strides of a real arena."""

    pages: torch.Tensor
    block_tables: torch.Tensor
    lengths: torch.Tensor

    @property
    def keys(self) -> torch.Tensor:
        return self.pages[:, 1, 0]

    @property
    def values(self) -> torch.Tensor:
        return self.pages[:, 1, 1]


def filled_cache(heads: Heads, lengths: list[int], dtype: torch.dtype, spare_columns: int = 3) -> Cache:
    """Sequences of `lengths` in pages of random order. Unused columns of the tables name a page that is all NaN."""
    counts = [num_pages_for(length) for length in lengths]
    pages = poisoned(sum(counts) + 1, 2, 2, heads.num_kv_heads, PAGE_TOKENS, heads.head_dim, dtype=dtype)
    free = [1 + index for index in torch.randperm(sum(counts)).tolist()]
    tables = []
    for length, count in zip(lengths, counts, strict=True):
        own, free = free[:count], free[count:]
        tables.append(own + [0] * (max(counts) + spare_columns - count))
        for index, page in enumerate(own):
            used = min(PAGE_TOKENS, length - index * PAGE_TOKENS)
            pages[page, 1, :, :, :used] = normal(2, heads.num_kv_heads, used, heads.head_dim, dtype=dtype)
    return Cache(pages, ints(tables), ints(lengths))
