"""Compiles every kernel variant that the models Weir serves need, for one architecture and without a GPU:
`compile_kernels.py 90 every`; `compile_kernels.py 90 widest`: of those models and types that need most of a
multiprocessor, which is a third of the work.

Each is launched once, on small CPU tensors of the right kind: the compiler sees types, strides, alignment and tile
sizes, which is all that makes a variant, and never values.

A driver that only names its target stands in for CUDA's, and a launch stops after the compiler. One line of JSON a
compiled kernel goes to standard output; what it takes of a multiprocessor is read from its machine code. The Triton
that is first on the module path compiles: `PYTHONPATH=build/triton-3.6.0:shared:. compile_kernels.py 90 every`.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from weir.model.files.dummy import shape_named
from weir.model.triton.memory import layer_pages, page_shape
from weir.ops.gpu.adjust_logits import AdjustIndex, adjust_logits
from weir.ops.gpu.attention import DeviceScoring
from weir.ops.gpu.decode_work import decode_tiles, decode_work
from weir.ops.gpu.exact_linear import exact_linear
from weir.ops.gpu.fp8_product import fp8_product
from weir.ops.gpu.fp8_rows import gated_quantize, quantize_rows
from weir.ops.gpu.gated import gated
from weir.ops.gpu.paged_decode import decode_scratch, paged_decode
from weir.ops.gpu.paged_prefill import paged_prefill, prefill_tiles
from weir.ops.gpu.rms_norm import rms_norm
from weir.ops.gpu.rotary_kv_write import rotary_kv_write
from weir.ops.gpu.sampling import sample, sampling_scratch
from weir.ops.gpu.sampling_filters import FilterIndex, sample_filtered
from weir.ops.gpu.token_logprobs import num_columns_of, token_logprobs
from weir.ops.reference import HeadNorms

CPU = torch.device("cpu")
# name: query heads, key heads, head_dim
MODELS = {
    "smollm2-135m": (9, 3, 64),
    "qwen2.5-0.5b": (14, 2, 64),
    "llama-3.1-8b": (32, 8, 128),
    "head-dim-80": (32, 32, 80),
    "gemma-head-dim-256": (8, 4, 256),
}

PLAIN = (DeviceScoring(0.125),)
SCORINGS = {
    # layers with a window of Gemma 3, and of Gemma 2, which caps scores
    "gemma-head-dim-256": (
        *PLAIN,
        DeviceScoring(0.0625, 512),
        DeviceScoring(0.0625, 4096, 50.0),
    ),
}

FP32_MODELS = ("smollm2-135m", "llama-3.1-8b", "head-dim-80")
"""Prefill of head_dim 256 in fp32 is left out: it compiles for half a minute, and spills 7 KiB a thread."""

# outputs, inputs, of the rows' type or fp32
LINEAR_LAYERS = {
    "narrow": (4096, 4096, False),
    "wide": (28672, 4096, False),
    "head": (49152, 576, True),
    "uneven": (896, 100, False),
    "uneven-wide": (8192, 100, False),
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
    queries, work = query_key_value[:, :num_heads], decode_work(tables, lengths, tiles)
    for scoring in SCORINGS.get(model, PLAIN):
        paged_decode(queries, pages[:, 0, 0], pages[:, 0, 1], work, scoring, out, scratch, tiles)


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
    keys, values = pages[:, 0, 0], pages[:, 0, 1]
    for scoring in SCORINGS.get(model, PLAIN):
        paged_prefill(queries, keys, values, tables, first_rows, ends, tile_list, scoring, out, tiles)


def launch_rotary(model: str, dtype: torch.dtype, _arch: int) -> None:
    num_heads, num_kv_heads, head_dim = MODELS[model]
    pages = pages_of(num_kv_heads, head_dim, dtype)
    query_key_value = torch.empty(4, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    table = torch.empty(8, head_dim // 2)
    positions, slot_mapping = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    for norms in (None, HeadNorms(torch.empty(head_dim, dtype=dtype), torch.empty(head_dim, dtype=dtype), 1e-6)):
        keys, values = pages[:, 0, 0], pages[:, 0, 1]
        rotary_kv_write(query_key_value, table, table.clone(), positions, slot_mapping, keys, values, None, norms)


def launch_int8_pages(model: str, dtype: torch.dtype, arch: int) -> None:
    """Attention over, and the write of, keys and values in int8."""
    num_heads, num_kv_heads, head_dim = MODELS[model]
    config = replace(shape_named("tiny"), num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    pages = layer_pages(torch.zeros(page_shape(config, 2, torch.int8), dtype=torch.int8), config)[0]
    query_key_value = torch.empty(4, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    queries, out = query_key_value[:, :num_heads], torch.empty(4, num_heads, head_dim, dtype=dtype)
    tiles = decode_tiles(head_dim, torch.int8)
    scratch = decode_scratch(4, num_heads, head_dim, 4096, tiles, CPU)
    work = decode_work(torch.zeros(4, 64, dtype=torch.int32), torch.ones(4, dtype=torch.int32), tiles)
    paged_decode(queries, pages.keys, pages.values, work, DeviceScoring(0.125), out, scratch, tiles, pages.scales)
    tables, ends = torch.zeros(2, 64, dtype=torch.int32), torch.tensor([2, 2], dtype=torch.int32)
    first_rows, tile_list = torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([[0, 0], [1, 0]]).int()
    prefill = prefill_tiles(num_heads, num_kv_heads, head_dim, dtype, arch)
    paged_prefill(
        queries,
        pages.keys,
        pages.values,
        tables,
        first_rows,
        ends,
        tile_list,
        DeviceScoring(0.125),
        out,
        prefill,
        pages.scales,
    )
    table, places = torch.empty(8, head_dim // 2), torch.zeros(4, dtype=torch.int32)
    for norms in (None, HeadNorms(torch.empty(head_dim, dtype=dtype), torch.empty(head_dim, dtype=dtype), 1e-6)):
        rotary_kv_write(
            query_key_value, table, table.clone(), places, places.long(), pages.keys, pages.values, pages.scales, norms
        )


def launch_norm(hidden: int, dtype: torch.dtype, _arch: int) -> None:
    rows, weight = torch.empty(4, hidden, dtype=dtype), torch.empty(hidden, dtype=dtype)
    rms_norm(rows, weight, 1e-5, rows)
    rms_norm(rows, weight, 1e-5, rows, torch.empty_like(rows))


def launch_linear(layer: str, dtype: torch.dtype, _arch: int) -> None:
    num_outputs, num_inputs, is_wider = LINEAR_LAYERS[layer]
    rows, matrix = torch.empty(4, num_inputs, dtype=dtype), torch.empty(num_outputs, num_inputs, dtype=dtype)
    out = torch.empty(4, num_outputs, dtype=torch.float32 if is_wider else dtype)
    exact_linear(rows, matrix, None, out)
    if not is_wider:
        exact_linear(rows, matrix, torch.empty(num_outputs, dtype=dtype), out)


def launch_silu(width: int, dtype: torch.dtype, _arch: int) -> None:
    gated(torch.empty(4, 2 * width, dtype=dtype), torch.empty(4, width, dtype=dtype))


def launch_fp8(shape: tuple[int, int], dtype: torch.dtype, _arch: int) -> None:
    """Of a model of so many hidden and intermediate columns."""
    hidden, width = shape
    quantized, scales = torch.empty(64, hidden, dtype=torch.float8_e4m3fn), torch.empty(64)
    rows, inner = torch.empty(64, hidden, dtype=dtype), torch.empty(64, width, dtype=torch.float8_e4m3fn)
    quantize_rows(rows, quantized, scales)
    rms_norm(rows, rows[0], 1e-5, quantized, None, scales)
    rms_norm(rows, rows[0], 1e-5, quantized, torch.empty_like(rows), scales)
    gated_quantize(torch.empty(64, 2 * width, dtype=dtype), inner, scales)
    matrix, matrix_scales = torch.empty(hidden, hidden, dtype=torch.float8_e4m3fn), torch.empty(hidden)
    for num_rows in (4, 64):
        for bias in (None, rows[0]):
            fp8_product(quantized[:num_rows], scales[:num_rows], matrix, matrix_scales, bias, rows[:num_rows])


def launch_sampling(vocab_size: int, _arch: int) -> None:
    logits, temperatures = torch.empty(4, vocab_size), torch.empty(4)
    token_ids = torch.empty(4, dtype=torch.int32)
    scratch = sampling_scratch(4, vocab_size, CPU)
    uniforms = torch.empty(4, dtype=torch.float64)
    sample(logits, temperatures, uniforms, token_ids, scratch)
    ints, wide = torch.zeros(4, dtype=torch.int32), torch.ones(4, dtype=torch.float64)
    sample_filtered(logits, FilterIndex(ints, temperatures, ints, wide, wide), uniforms, token_ids)
    token_logprobs(logits, ints, ints, ints, torch.empty(4, num_columns_of(20), dtype=torch.float64))
    firsts, penalties = torch.zeros(5, dtype=torch.int32), torch.ones(4, 3, dtype=torch.float64)
    adjust = AdjustIndex(ints, firsts, ints, temperatures, firsts, ints, ints, penalties, firsts, ints)
    adjust_logits(logits, adjust, torch.zeros(4, vocab_size, dtype=torch.int32))


def widest_launches() -> dict[str, Callable[[int], None]]:
    """At least one of each kernel, in bf16; attention and products in fp32 too."""
    others = ("smollm2", "qwen", "head-dim-80", "fp16", "fp8-576", "fp8-4096", "sampling-49152")
    return {variant: launch for variant, launch in all_launches().items() if not any(map(variant.count, others))}


def all_launches() -> dict[str, Callable[[int], None]]:
    launches: dict[str, Callable[[int], None]] = {}
    for model in MODELS:
        for op in (launch_decode, launch_prefill, launch_rotary):
            launches[f"{op.__name__.removeprefix('launch_')}-{model}-bf16"] = functools.partial(
                op, model, torch.bfloat16
            )
    for op in (launch_decode, launch_prefill, launch_rotary):
        launches[f"{op.__name__.removeprefix('launch_')}-llama-3.1-8b-fp16"] = functools.partial(
            op, "llama-3.1-8b", torch.float16
        )
    for model in FP32_MODELS:
        for op in (launch_decode, launch_prefill, launch_rotary):
            launches[f"{op.__name__.removeprefix('launch_')}-{model}-fp32"] = functools.partial(
                op, model, torch.float32
            )
    for layer in LINEAR_LAYERS:
        launches[f"linear-{layer}-bf16"] = functools.partial(launch_linear, layer, torch.bfloat16)
        launches[f"linear-{layer}-fp32"] = functools.partial(launch_linear, layer, torch.float32)
    for model in MODELS:
        launches[f"int8-pages-{model}-bf16"] = functools.partial(launch_int8_pages, model, torch.bfloat16)
    for hidden in (576, 4096):
        launches[f"norm-{hidden}"] = functools.partial(launch_norm, hidden, torch.bfloat16)
    launches["silu-14336"] = functools.partial(launch_silu, 14336, torch.bfloat16)
    for shape in ((576, 1536), (4096, 14336), (8192, 28672)):
        launches[f"fp8-{shape[0]}"] = functools.partial(launch_fp8, shape, torch.bfloat16)
    for vocab_size in (49152, 128256):
        launches[f"sampling-{vocab_size}"] = functools.partial(launch_sampling, vocab_size)
    return launches


class NamedDriver:
    """As much of a driver as the compiler asks for."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def resources(binary: Any) -> dict[str, int]:
    """Registers a thread; bytes of stack a thread, which is where values go that have no register; bytes of shared
    memory a block."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(binary.asm["cubin"])
        cubin.flush()
        command = [str(cuobjdump), "-res-usage", cubin.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of {binary.metadata.name}: {said}")
    return {
        "registers": int(found[1]),
        "stack_bytes": int(found[2]) + int(found[3]),
        "shared_bytes": binary.metadata.shared,
        "num_warps": binary.metadata.num_warps,
    }


def compiling(variant: str, arch: int, seen: set[str]) -> Callable[[Any, tuple[int, ...]], Callable[..., None]]:
    """What `kernel[grid]` is from now on."""

    def at_grid(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def compile_only(*args: object, **kwargs: object) -> None:
            binary = kernel.warmup(*args, grid=grid, **kwargs)
            # models of the same shape share variants: the second launch compiles nothing
            if binary.hash not in seen:
                seen.add(binary.hash)
                params = {"variant": variant, "kernel": kernel.fn.__name__, "arch": arch, "triton": triton.__version__}
                print(json.dumps(params | resources(binary)), flush=True)

        return compile_only

    return at_grid


def main(arch: int, launches: dict[str, Callable[[int], None]]) -> None:
    torch.set_num_threads(1)
    driver.set_active(NamedDriver(arch))
    seen: set[str] = set()
    for variant, launch in launches.items():
        JITFunction.__getitem__ = compiling(variant, arch, seen)
        launch(arch)


if __name__ == "__main__":
    main(int(sys.argv[1]), {"every": all_launches, "widest": widest_launches}[sys.argv[2]]())
