"""Whether AMX works here: on some virtual machines it is announced, and the first instruction fails.

A process must ask Linux for the permission to use tiles, once for all its threads. Then a child process multiplies two
small matrices by tiles. If it dies, hangs or is wrong, AMX is not used. What it found is kept beside the kernels until
the machine starts again, for a virtual one may start on another host.
"""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import llvmlite
import llvmlite.binding
import numpy as np
import xxhash
from llvmlite import ir
from numpy.typing import NDArray

from weir.ops.simd.amx import (
    TILE_ROW_BYTES,
    TILE_ROWS,
    TileSize,
    emit_add_product,
    emit_configure,
    emit_load_tile,
    emit_release,
    emit_store_tile,
    emit_zero,
)
from weir.ops.simd.cache_folder import kernels_folder

_TIMEOUT_S = 20.0
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
_NUM_INPUTS = 32
_FEATURES = "+amx-tile,+amx-int8"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def find_problem() -> str | None:
    """Why tiles cannot be used; None where they can, from now on by all threads of this process.

    The child runs where nothing was kept since the machine started: some tenths of a second.
    """
    refusal = _refusal()
    if refusal is not None:
        return refusal
    machine, path = _machine(), kernels_folder() / "amx.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(path.read_text())
        if kept["machine"] == machine and isinstance(kept["problem"], str | None):
            return kept["problem"]
    problem = probe()
    # a folder that cannot be written has its own error, when kernels are compiled
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps({"machine": machine, "problem": problem}))
        unfinished.replace(path)
    return problem


def probe(timeout_s: float = _TIMEOUT_S) -> str | None:
    """What went wrong with a product in a child process; None if nothing did."""
    try:
        child = subprocess.run(
            [sys.executable, "-m", __name__],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"a first product had no end within {timeout_s:g} s"
    if child.returncode == 0:
        return None
    if child.returncode < 0:
        return f"a first product was ended by signal {-child.returncode} ({signal.strsignal(-child.returncode)})"
    lines = child.stderr.splitlines() or [f"exit code {child.returncode}"]
    return f"a first product failed: {lines[-1]}"


def _refusal() -> str | None:
    """Asks for the permission; the answer if it is no."""
    c_library = ctypes.CDLL(None, use_errno=True)
    if c_library.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0:
        return None
    return f"Linux refuses the permission to use tiles: {os.strerror(ctypes.get_errno())}"


def _machine() -> str:
    """Changes with the start of the machine, the compiler and what is tried."""
    digest = xxhash.xxh3_64(f"{_BOOT_ID.read_text()} {llvmlite.__version__}".encode())
    for source in (Path(__file__), Path(__file__).with_name("amx.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _products(module: ir.Module) -> ir.Function:
    """`products(rows, weights, totals, num_rows)`: addresses of [16, 32], [8, 16, 4] and [16, 16] numbers."""
    int64 = ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [int64] * 4), "products")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    rows, weights, totals, num_rows = function.args
    weight_rows = ir.Constant(int64, _NUM_INPUTS // 4)
    emit_configure(
        builder,
        [TileSize(num_rows, TILE_ROW_BYTES), TileSize(num_rows, _NUM_INPUTS), TileSize(weight_rows, TILE_ROW_BYTES)],
    )
    line = ir.Constant(int64, TILE_ROW_BYTES)
    emit_zero(builder, 0)
    emit_load_tile(builder, 1, rows, ir.Constant(int64, _NUM_INPUTS))
    emit_load_tile(builder, 2, weights, line)
    emit_add_product(builder, 0, 1, 2)
    emit_store_tile(builder, 0, totals, line)
    emit_release(builder)
    builder.ret_void()
    return function


def _multiply(rows: NDArray[np.int8], weights: NDArray[np.int8], num_rows: int) -> NDArray[np.int32]:
    """`rows` [16, 32] times `weights` [8, 16, 4]; [16, 16], of which `num_rows` rows are computed."""
    llvmlite.binding.initialize_native_target()
    llvmlite.binding.initialize_native_asmprinter()
    module = ir.Module()
    _products(module)
    machine = llvmlite.binding.Target.from_default_triple().create_target_machine(features=_FEATURES, jit=True)
    totals = np.zeros((TILE_ROWS, TILE_ROWS), dtype=np.int32)
    with llvmlite.binding.create_mcjit_compiler(llvmlite.binding.parse_assembly(str(module)), machine) as engine:
        engine.finalize_object()
        products = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(engine.get_function_address("products"))
        products(rows.ctypes.data, weights.ctypes.data, totals.ctypes.data, num_rows)
    return totals


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    refusal = _refusal()
    if refusal is not None:
        sys.exit(refusal)
    random = np.random.default_rng(0)
    rows = random.integers(-128, 128, (TILE_ROWS, _NUM_INPUTS)).astype(np.int8)
    weights = random.integers(-128, 128, (_NUM_INPUTS // 4, TILE_ROWS, 4)).astype(np.int8)
    expected = rows.astype(np.int32) @ weights.transpose(0, 2, 1).reshape(_NUM_INPUTS, TILE_ROWS).astype(np.int32)
    for num_rows in (TILE_ROWS, 5):
        expected[num_rows:] = 0
        if not np.array_equal(_multiply(rows, weights, num_rows), expected):
            sys.exit("its numbers are wrong")


if __name__ == "__main__":
    _main()
