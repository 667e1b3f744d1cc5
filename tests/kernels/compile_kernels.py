"""Compiles what the launchers would launch, for one architecture and without a GPU: `compile_kernels.py 90`.

A driver that only names its target stands in for CUDA's, and a launch stops after the compiler. One line of JSON a
compiled kernel goes to standard output. Resources come from the assembler's report, which Triton prints only when it
compiles: the cache must be empty.
"""

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
os.environ.pop("TRITON_INTERPRET", None)

import torch
from tests.kernels.launches import LAUNCHES
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


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


def resources(binary: Any, report: str) -> dict[str, int]:
    """Registers a thread, bytes spilled to memory, bytes of shared memory a block."""
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    if registers is None or not spills:
        raise RuntimeError(f"the assembler reported nothing about {binary.metadata.name}: is the cache empty?")
    return {
        "registers": int(registers[1]),
        "spilled_bytes": max(map(int, spills)),
        "shared_bytes": binary.metadata.shared,
        "num_warps": binary.metadata.num_warps,
    }


def compiling(variant: str, arch: int, seen: set[str]) -> Callable[[Any, tuple[int, ...]], Callable[..., None]]:
    """What `kernel[grid]` is from now on."""

    def at_grid(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def compile_only(*args: object, **kwargs: object) -> None:
            report = io.StringIO()
            with contextlib.redirect_stdout(report):
                binary = kernel.warmup(*args, grid=grid, **kwargs)
            # models of the same shape share variants: the second launch compiles nothing
            if binary.hash not in seen:
                seen.add(binary.hash)
                params = {"variant": variant, "kernel": kernel.fn.__name__, "arch": arch}
                print(json.dumps(params | resources(binary, report.getvalue())), flush=True)

        return compile_only

    return at_grid


def main(arch: int) -> None:
    torch.set_num_threads(1)
    driver.set_active(NamedDriver(arch))
    seen: set[str] = set()
    for variant, launch in LAUNCHES.items():
        JITFunction.__getitem__ = compiling(variant, arch, seen)
        launch(arch)


if __name__ == "__main__":
    main(int(sys.argv[1]))
