"""The first start on a machine compiles for 20 s of processor time: in two processes, as numba lets one thread compile.

    here:   the linear layers and what lies between them ─┐ ─> the forward pass ─┐ ─> all that serves
    beside: attention ────────────────────────────────────┘ ─> sampling ─────────┘

What a kernel calls is compiled, or found in the cache, when it is compiled itself. So the forward pass comes after its
parts, and no part is compiled on both sides.
"""

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba import boolean, float32, float64, int32, int64, types, uint8, uint16

from weir.model.cpu.forward import linear_share
from weir.model.sampler import compile_kernels
from weir.ops.cpu.attention import Scoring
from weir.ops.cpu.embedding import embedding_range
from weir.ops.cpu.gated import gated_quantize_range
from weir.ops.cpu.head_norm import norm_heads
from weir.ops.cpu.paged_decode import decode_blocks, decode_merge
from weir.ops.cpu.paged_prefill import paged_prefill
from weir.ops.cpu.quantize import quantize_range
from weir.ops.cpu.rms_norm import rms_norm_add_range, rms_norm_quantize_range
from weir.ops.cpu.rotary_kv_write import rotary_kv_write
from weir.ops.cpu.softcap import cap_rows
from weir.ops.simd.jit import kernel_cache_directory

_log = logging.getLogger(__name__)
_TIMEOUT_S = 300.0
_DONE_FILE = "compiled"

_INTS, _INT_ROWS, _ROWS, _PAGES = int32[::1], int32[:, ::1], float32[:, ::1], uint16[:, :, :, :, ::1]
_BYTE_ROWS, _PARTS = uint8[:, ::1], int64[:, ::1]
_WEIGHTS = types.Array(uint8, 1, "C", readonly=True)
_NORM, _TABLE = types.Array(float32, 1, "C", readonly=True), types.Array(float32, 2, "C", readonly=True)

_SCORING, _ITEMS = types.NamedTuple((int64, float32, float32), Scoring), (_INT_ROWS, int64)

_Kernels = tuple[tuple[Any, tuple[types.Type, ...]], ...]
_BETWEEN: _Kernels = (
    (linear_share, (_WEIGHTS, _PARTS, _BYTE_ROWS, _ROWS, float32[::1], boolean, int64, int64)),
    (embedding_range, (_WEIGHTS, int64, float32, int64[::1], _ROWS, int64, int64)),
    (rms_norm_quantize_range, (_ROWS, _NORM, float64, _BYTE_ROWS, int64, int64)),
    (rms_norm_add_range, (_ROWS, _NORM, float64, _ROWS, int64, int64)),
    (norm_heads, (_ROWS, _TABLE, int64, int64, float64, int64, int64)),
    (rotary_kv_write, (_ROWS, _INTS, _INTS, _TABLE, _TABLE, _PAGES, int64, int64, int64)),
    (decode_merge, (_INTS, _INT_ROWS, int64, int64, int64, float32, _ROWS, _ROWS, int64, int64)),
    (quantize_range, (_ROWS, _BYTE_ROWS, int64, int64)),
    (cap_rows, (_ROWS, float32)),
    (gated_quantize_range, (_ROWS, _BYTE_ROWS, boolean, int64, int64)),
)
_ATTENTION: _Kernels = (
    (
        paged_prefill,
        (_ROWS, _INTS, _INTS, _INTS, _INT_ROWS, _PAGES, int64, int64, _SCORING, *_ITEMS, _ROWS, _ROWS, int64, int64),
    ),
    (
        decode_blocks,
        (_ROWS, _INTS, _INTS, _INT_ROWS, _PAGES, int64, int64, _SCORING, *_ITEMS, _ROWS, _ROWS, int64, int64),
    ),
)
"""As the forward pass calls them; other types would be compiled anew there, which a test notices."""


@contextmanager
def compiling_beside(compile_forward: Callable[[], None]) -> Iterator[None]:
    """Compiles all kernels, if that was never done for this folder of kernels, whose lock the caller holds. At the end
    of the block they count as compiled.

    A helper that fails or hangs costs time only: whatever it has not done is compiled here.
    """
    done = kernel_cache_directory() / _DONE_FILE
    if not done.exists():
        with _helper() as helper:
            _compile(_BETWEEN)
            assert helper.stdout is not None
            helper.stdout.readline()
            compile_forward()
            if helper.wait() != 0:
                _log.warning("the process that compiles attention and sampling has failed; they are compiled here")
    yield
    done.touch()


@contextmanager
def _helper() -> Iterator["subprocess.Popen[str]"]:
    """Runs `_main` beside, for `_TIMEOUT_S` at most."""
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as helper:
        timer = threading.Timer(_TIMEOUT_S, helper.kill)
        timer.start()
        try:
            yield helper
        finally:
            timer.cancel()
            helper.kill()


def _compile(kernels: _Kernels) -> None:
    for compiled, signature in kernels:
        compiled.compile(signature)


def _main() -> None:
    _compile(_ATTENTION)
    print("attention is done", flush=True)  # noqa: T201 - to the process that started this one
    compile_kernels()


if __name__ == "__main__":
    _main()
