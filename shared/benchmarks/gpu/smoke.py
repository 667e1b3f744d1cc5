"""Each kernel once beside its reference, on small shapes, and one graph: does anything run here at all?"""

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from benchmarks.gpu.case_loop import CaseLoop
from benchmarks.gpu.cases import full_width, one_byte
from benchmarks.gpu.cases.full_width import AttentionShape, KernelCase
from benchmarks.gpu.kernels import MAX_ERROR
from benchmarks.gpu.model import CudaKind, prefill_and_decode
from benchmarks.gpu.output import Record
from weir.model.triton.batch import TritonLimits
from weir.ops.gpu.fp8_product import fp8_product

_SHAPE = AttentionShape("small", 8, 2, 128)
_LENGTHS = [5, 40, 700]
_CHUNK = 40
_GRAPH_LIMITS = TritonLimits(max_rows=64, max_sequences=2, max_context_tokens=256)
_NUM_TOKENS = 8
_NUM_PAGES = 32


def makers_of(device: torch.device, compute_capability: int) -> Mapping[str, Callable[[], KernelCase]]:
    """By name of the kernel."""
    lengths = [max(length, _CHUNK) for length in _LENGTHS]
    return {
        "paged_decode": partial(full_width.decode_case, _SHAPE, _LENGTHS, device),
        "paged_prefill": partial(full_width.prefill_case, _SHAPE, _CHUNK, lengths, device, compute_capability),
        "exact_linear": partial(full_width.linear_case, 37, 1024, 1024, device),
        "rms_norm": partial(full_width.norm_case, 5, 4096, device),
        "silu_mul": partial(full_width.silu_case, 5, 4096, device),
        "rotary_kv_write": partial(full_width.rotary_case, _SHAPE, 37, device),
        "rotary_kv_write with norms": partial(full_width.rotary_case, _SHAPE, 37, device, has_norms=True),
        "rms_norm to E4M3": partial(one_byte.fp8_norm_case, 5, 4096, device),
        "silu_mul to E4M3": partial(one_byte.fp8_silu_case, 5, 4096, device),
        "E4M3 product": partial(one_byte.fp8_product_case, 5, 256, 512, device),
        "E4M3 product, own": partial(one_byte.fp8_product_case, 70, 256, 512, device, fp8_product),
        "paged_decode, int8": partial(one_byte.int8_decode_case, _SHAPE, _LENGTHS, device),
        "sampling": partial(full_width.sampling_case, 4, 32000, device),
    }


def compare(make: Callable[[], KernelCase]) -> Iterator[Record]:
    error = make().error()
    is_right = error <= MAX_ERROR  # False for NaN
    yield {"verdict": "ok" if is_right else "failed", "error": error, "allowed": MAX_ERROR}


def _graph() -> Iterator[Record]:
    """Replayed decodes of a tiny model are those that are launched one kernel at a time."""
    found = []
    for uses_graphs in (False, True):
        kind = CudaKind("tiny", _GRAPH_LIMITS, uses_graphs)
        memory = kind.create_memory(_NUM_PAGES * kind.page_bytes)
        runner, warm_up = kind.make_runner(memory, _NUM_PAGES)
        warm_up()
        found.append(prefill_and_decode(runner, tuple(range(20)), _NUM_TOKENS))
        del runner, warm_up
        torch.cuda.synchronize()
        memory.close()
    launched, replayed = found
    yield {"verdict": "ok" if launched == replayed else "failed", "launched": launched, "replayed": replayed}


def main() -> int:
    loop = CaseLoop.from_command_line("smoke", __doc__)
    torch.manual_seed(0)
    major, _ = torch.cuda.get_device_capability()
    for name, make in makers_of(torch.device("cuda"), 10 * major).items():
        loop.run(name, partial(compare, make))
    loop.run("graph of tiny", _graph)
    return loop.exit_code


if __name__ == "__main__":
    sys.exit(main())
