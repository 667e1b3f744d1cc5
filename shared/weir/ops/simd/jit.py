"""How CPU kernels are compiled: without the interpreter's lock, without fast-math, and kept on disk.

numba keys a cached kernel by its own source file alone; a kernel here also depends on the intrinsics of other files and
on the tier chosen at start. So the cache lies in a folder whose name is made of all of that.
"""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite
import numba
import xxhash
from numba.extending import intrinsic

from weir.ops.simd.features import kernel_tier

F = TypeVar("F", bound=Callable[..., Any])

_OPS_ROOT = Path(__file__).parents[1]


@cache
def kernel_cache_directory() -> Path:
    """`$WEIR_CACHE/kernels/<tier>-<digest>` (`~/.cache/weir` by default); the digest: all ops, and the compiler."""
    digest = xxhash.xxh3_64(f"{numba.__version__} {llvmlite.__version__}".encode())
    for source in sorted(_OPS_ROOT.rglob("*.py")):
        digest.update(str(source.relative_to(_OPS_ROOT)).encode() + b"\0" + source.read_bytes())
    root = Path(os.environ.get("WEIR_CACHE") or Path.home() / ".cache" / "weir")
    return root / "kernels" / f"{kernel_tier()}-{digest.hexdigest()}"


def kernel(function: F) -> F:
    """Compiles at the first call of each signature, and loads it from the cache at later starts."""
    return cast(F, _jit()(function))


def parallel_kernel(function: F) -> F:
    """As `kernel`, with `numba.prange` loops that run on numba's threads."""
    return cast(F, _jit(parallel=True)(function))


def simd(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that emits LLVM IR callable from kernels. See `numba.extending.intrinsic`."""
    return cast(Callable[..., Any], intrinsic(function))


def _jit(**options: bool) -> Callable[[Any], Any]:
    # read when the decorator looks for a place for its files
    numba.config.CACHE_DIR = str(kernel_cache_directory())
    jit: Callable[[Any], Any] = numba.njit(nogil=True, cache=True, error_model="numpy", boundscheck=False, **options)
    return jit
