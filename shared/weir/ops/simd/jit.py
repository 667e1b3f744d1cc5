"""How CPU kernels are compiled: without the interpreter's lock, without fast-math, and kept on disk.

numba keys a cached kernel by its own source file alone; a kernel here also depends on the intrinsics of other files and
on the instruction set chosen at start. So the cache lies in a folder whose name is made of all of that.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite
import numba
import xxhash
from numba.extending import intrinsic

from weir.core.cache_dir import kernels_dir, make_trusted_kernels
from weir.core.file_lock import file_lock
from weir.ops.simd.features import instruction_set

F = TypeVar("F", bound=Callable[..., Any])

_COMPILING_TIMEOUT_S = 900.0

_ROOMS = Path(__file__).parents[2]
_COMPILED = ("ops/cpu", "ops/simd", "model/cpu")
_COMPILED_IN = ("kv/geometry.py", "ops/head_dims.py")


def kernel_sources() -> list[Path]:
    """All that compiled kernels depend on: the ops of CPUs, the forward pass that puts them together, and the modules
    of other rooms whose numbers are compiled in."""
    in_folders = (source for folder in _COMPILED for source in (_ROOMS / folder).glob("*.py"))
    return sorted([*in_folders, *(_ROOMS / name for name in _COMPILED_IN)])


@cache
def kernel_cache_directory() -> Path:
    """`$WEIR_CACHE/kernels/<instruction set>-<digest>`, by default in `~/.cache/weir`; of sources and compiler.

    It is there, and this user's alone. Raises UntrustedFolder: what numba loads from it, it runs.
    """
    digest = xxhash.xxh3_64(f"{numba.__version__} {llvmlite.__version__}".encode())
    for source in kernel_sources():
        digest.update(str(source.relative_to(_ROOMS)).encode() + b"\0" + source.read_bytes())
    folder = kernels_dir() / f"{instruction_set()}-{digest.hexdigest()}"
    make_trusted_kernels(folder)
    return folder


@contextmanager
def compiling_alone() -> Iterator[None]:
    """Of several processes that start at once, the first compiles and the others then find everything in the cache.

    numba's own files would survive it otherwise, but not always with every kernel under its own name. Raises
    StillLocked when another process has been compiling for too long.
    """
    with file_lock(kernel_cache_directory() / "lock", "compiling kernels", timeout_s=_COMPILING_TIMEOUT_S):
        yield


def kernel(function: F) -> F:
    """Compiles at the first call of each signature, and loads it from the cache at later starts."""
    return cast(F, _jit()(function))


def inlined(function: F) -> F:
    """Becomes part of the kernels that call it and is compiled with them only: once, not once a level of calls."""
    return cast(F, _jit(inline="always")(function))


def parallel_kernel(function: F) -> F:
    """As `kernel`, with `numba.prange` loops that run on numba's threads."""
    return cast(F, _jit(parallel=True)(function))


def simd(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that emits LLVM IR callable from kernels. See `numba.extending.intrinsic`."""
    return cast(Callable[..., Any], intrinsic(function))


def _jit(**options: bool | str) -> Callable[[Any], Any]:
    # read when the decorator looks for a place for its files
    numba.config.CACHE_DIR = str(kernel_cache_directory())
    jit: Callable[[Any], Any] = numba.njit(
        nogil=True, cache=True, no_cfunc_wrapper=True, error_model="numpy", boundscheck=False, **options
    )
    return jit
