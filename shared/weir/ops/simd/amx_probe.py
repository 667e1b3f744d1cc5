"""Whether AMX works here: on some virtual machines it is announced, and the first instruction fails.

A process must ask Linux for the permission to use tiles, once for all its threads. Then a child process multiplies two
small matrices by tiles. If it dies, hangs or is wrong, AMX is not used. What it found out about the processor is kept
beside the kernels until the machine starts again, for a virtual one may start on another host. What may pass, such as a
lack of memory or time, is not kept.
"""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import llvmlite
import llvmlite.binding
import numpy as np
import xxhash
from llvmlite import ir
from numpy.typing import NDArray

from weir.core.cache_dir import cache_dir
from weir.core.file_lock import StillLocked, file_lock
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

_TIMEOUT_S = 20.0
_LOCK_TIMEOUT_S = 30.0
_WRONG_NUMBERS_CODE = 3
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
_NUM_INPUTS = 32
_FEATURES = "+amx-tile,+amx-int8"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """`problem`: None if a product was right. `is_of_processor`: it would be found again."""

    problem: str | None
    is_of_processor: bool


def find_problem() -> str | None:
    """Why tiles cannot be used; None where they can, from now on by all threads of this process.

    The child runs where nothing was kept since the machine started: some tenths of a second. Of several processes one
    runs it, and the others wait.
    """
    refusal = _refusal()
    if refusal is not None:
        return refusal
    path = cache_dir() / "kernels" / "amx.json"
    try:
        machine = _machine()
        found = _try_read(path, machine)
        if found is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with file_lock(path.with_name("amx.lock"), "trying AMX", timeout_s=_LOCK_TIMEOUT_S):
                found = _try_read(path, machine) or _probe_and_keep(path, machine)
    except (OSError, StillLocked):
        # a folder that cannot be written has its own error, when kernels are compiled
        found = probe()
    return found.problem


def _try_read(path: Path, machine: str) -> ProbeResult | None:
    """What was kept on this machine."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(path.read_text())
        if kept["machine"] == machine and isinstance(kept["problem"], str | None):
            return ProbeResult(kept["problem"], is_of_processor=True)
    return None


def _probe_and_keep(path: Path, machine: str) -> ProbeResult:
    found = probe()
    if found.is_of_processor:
        with suppress(OSError):
            unfinished = path.with_name(f"{path.name}.{os.getpid()}")
            unfinished.write_text(json.dumps({"machine": machine, "problem": found.problem}))
            unfinished.replace(path)
    return found


def probe(timeout_s: float = _TIMEOUT_S) -> ProbeResult:
    """How a product in a child process went."""
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
        return ProbeResult(f"a first product had no end within {timeout_s:g} s", is_of_processor=False)
    except OSError as error:
        return ProbeResult(f"a first product could not be tried: {error}", is_of_processor=False)
    code = child.returncode
    if code == 0:
        return ProbeResult(None, is_of_processor=True)
    if code < 0:
        problem = f"a first product was ended by signal {-code} ({signal.strsignal(-code)})"
        return ProbeResult(problem, is_of_processor=-code == signal.SIGILL)
    lines = child.stderr.splitlines() or [f"exit code {code}"]
    return ProbeResult(f"a first product failed: {lines[-1]}", is_of_processor=code == _WRONG_NUMBERS_CODE)


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
            sys.stderr.write("its numbers are wrong\n")
            sys.exit(_WRONG_NUMBERS_CODE)


if __name__ == "__main__":
    _main()
