"""One launch of every kernel variant that the models Weir serves need, on small CPU tensors of the right kind.

A launch takes the compute capability that it is compiled for.

Values are never read: the compiler sees types, strides, alignment and tile sizes, which is all that makes a variant.
"""

import functools
from collections.abc import Callable

import torch

from weir.ops.page_copy.launch import gather_pages, scatter_pages
from weir.ops.paged_decode.launch import decode_scratch, decode_tiles, paged_decode
from weir.ops.paged_prefill.launch import paged_prefill, prefill_tiles
from weir.ops.rms_norm.launch import rms_norm
from weir.ops.rotary_kv_write.launch import rotary_kv_write
from weir.ops.sampling.launch import sample, sampling_scratch
from weir.ops.silu_mul.launch import silu_mul

CPU = torch.device("cpu")
# name: query heads, key heads, head_dim
MODELS = {
    "smollm2-135m": (9, 3, 64),
    "qwen2.5-0.5b": (14, 2, 64),
    "llama-3.1-8b": (32, 8, 128),
    "head-dim-80": (32, 32, 80),
    "gemma-head-dim-256": (8, 4, 256),
}


def pages_of(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(2, 2, 2, num_kv_heads, 16, head_dim, dtype=dtype)


def launch_decode(model: str, dtype: torch.dtype, _arch: int) -> None:
    num_heads, num_kv_heads, head_dim = MODELS[model]
    pages = pages_of(num_kv_heads, head_dim, dtype)
    query_key_value = torch.empty(4, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    out = torch.empty(4, num_heads, head_dim, dtype=dtype)
    tiles = decode_tiles(head_dim, dtype)
    scratch = decode_scratch(4, num_heads, head_dim, 4096, tiles, CPU)
    tables, lengths = torch.zeros(4, 64, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    queries = query_key_value[:, :num_heads]
    paged_decode(queries, pages[:, 0, 0], pages[:, 0, 1], tables, lengths, 0.125, out, scratch, tiles)


def launch_prefill(model: str, dtype: torch.dtype, arch: int) -> None:
    num_heads, num_kv_heads, head_dim = MODELS[model]
    pages = pages_of(num_kv_heads, head_dim, dtype)
    query_key_value = torch.empty(4, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    out = torch.empty(4, num_heads, head_dim, dtype=dtype)
    tables, ends = torch.zeros(2, 64, dtype=torch.int32), torch.tensor([2, 2], dtype=torch.int32)
    first_rows = torch.tensor([0, 2, 4], dtype=torch.int32)
    tile_list = torch.tensor([[0, 0], [1, 0]], dtype=torch.int32)
    queries = query_key_value[:, :num_heads]
    tiles = prefill_tiles(num_heads, num_kv_heads, head_dim, dtype, arch)
    paged_prefill(queries, pages[:, 0, 0], pages[:, 0, 1], tables, first_rows, ends, tile_list, 0.125, out, tiles)


def launch_rotary(model: str, dtype: torch.dtype, _arch: int) -> None:
    num_heads, num_kv_heads, head_dim = MODELS[model]
    pages = pages_of(num_kv_heads, head_dim, dtype)
    query_key_value = torch.empty(4, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    table = torch.empty(8, head_dim // 2)
    positions, slots = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    rotary_kv_write(query_key_value, table, table.clone(), positions, slots, pages[:, 0, 0], pages[:, 0, 1])


def launch_norm(hidden: int, dtype: torch.dtype, _arch: int) -> None:
    rows, weight = torch.empty(4, hidden, dtype=dtype), torch.empty(hidden, dtype=dtype)
    rms_norm(rows, weight, 1e-5, rows)
    rms_norm(rows, weight, 1e-5, rows, torch.empty_like(rows))


def launch_silu(width: int, dtype: torch.dtype, _arch: int) -> None:
    silu_mul(torch.empty(4, 2 * width, dtype=dtype), torch.empty(4, width, dtype=dtype))


def launch_copies(_arch: int) -> None:
    pages, buffer, ids = torch.empty(4, 4096, dtype=torch.uint8), torch.empty(2, 4096, dtype=torch.uint8), [0, 1]
    gather_pages(pages, torch.tensor(ids), buffer)
    scatter_pages(buffer, torch.tensor(ids), pages)


def launch_sampling(vocab_size: int, _arch: int) -> None:
    logits, temperatures = torch.empty(4, vocab_size), torch.empty(4)
    token_ids = torch.empty(4, dtype=torch.int32)
    scratch = sampling_scratch(4, vocab_size, CPU)
    sample(logits, temperatures, torch.empty(4, dtype=torch.float64), token_ids, scratch)


def _launches() -> dict[str, Callable[[int], None]]:
    launches: dict[str, Callable[[int], None]] = {"page_copy": launch_copies}
    for model in MODELS:
        for op in (launch_decode, launch_prefill, launch_rotary):
            launches[f"{op.__name__.removeprefix('launch_')}-{model}-bf16"] = functools.partial(
                op, model, torch.bfloat16
            )
    for op in (launch_decode, launch_prefill, launch_rotary):
        launches[f"{op.__name__.removeprefix('launch_')}-llama-3.1-8b-fp16"] = functools.partial(
            op, "llama-3.1-8b", torch.float16
        )
    for hidden in (576, 4096):
        launches[f"norm-{hidden}"] = functools.partial(launch_norm, hidden, torch.bfloat16)
    launches["silu-14336"] = functools.partial(launch_silu, 14336, torch.bfloat16)
    for vocab_size in (49152, 128256):
        launches[f"sampling-{vocab_size}"] = functools.partial(launch_sampling, vocab_size)
    return launches


LAUNCHES = _launches()
