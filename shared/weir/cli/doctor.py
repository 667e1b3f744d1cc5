"""`weir doctor`: what this machine has, what will be used, and what is in the way."""

import json
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import typer

from weir.bus.server import NatsServerMissing, find_nats_server
from weir.cli import EXIT_FAILED, options
from weir.cli.console import stdout
from weir.core.cache_dir import check_kernels, check_triton_cache
from weir.core.trusted_folder import UntrustedFolder
from weir.model.files.catalog import CATALOG, model_cache_dir
from weir.runtime.extras import DISTRIBUTION, ExtraMissing, check_extra, install_command
from weir.runtime.machine_memory import available_bytes

_GIB = 2**30
_LEAST_MEMORY_GIB = 4
_DEFAULT_SHAPE = "smollm2-135m"
NUM_SLOTS = 512
"""Of a transfer service with its own settings."""
NUM_DESCRIPTORS = 19_776
"""What the bounds of a gateway come to, which needs the most."""
_PORTS = {"gRPC": 50051, "HTTP": 8000}
_PACKAGES = ("numpy", "grpcio", "nats-py", "tokenizers", "opentelemetry-sdk")
_WORKER_PACKAGES = ("torch", "numba")

Verdict = Literal["ok", "note", "warning", "missing"]
_STYLES: dict[Verdict, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "missing": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact. `remedy` says what to do where something is in the way."""

    what: str
    found: str
    verdict: Verdict = "ok"
    remedy: str = ""


def doctor(as_json: options.AsJson = False) -> None:
    """Say what this machine has and what Weir will use. Exit code 1 if something needed is missing.

    \b
    weir doctor
    weir doctor --json
    """
    findings = [*_machine(), *_memory(), _open_files(), *_programs(), *_model(), *_ports()]
    if as_json:
        stdout.out(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            stdout.print(f"{finding.verdict:<8}", style=_STYLES[finding.verdict], end="")
            stdout.print(f"{finding.what:<{width}}  {finding.found}", markup=False, soft_wrap=True)
            if finding.remedy:
                stdout.print(f"{'':<{width + 10}}{finding.remedy}", style="dim", markup=False, soft_wrap=True)
    if any(finding.verdict == "missing" for finding in findings):
        raise typer.Exit(EXIT_FAILED)


def _machine() -> Iterator[Finding]:
    yield Finding("Python", f"{platform.python_version()} at {sys.executable}")
    cores = len(os.sched_getaffinity(0))
    yield Finding("cores", f"{cores}; the workers of a stack share them", "ok" if cores > 1 else "warning")
    flags = _cpu_flags()
    known = [flag for flag in ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "amx_int8", "asimd") if flag in flags]
    yield Finding("SIMD", " ".join(known) or f"none of those looked for ({platform.machine()})")
    yield from _arithmetic(cores, flags)
    yield from _gpu()


def _gpu() -> Iterator[Finding]:
    """Of `--device cuda`."""
    from weir.model.device_check import DeviceMissing, find_gpu

    try:
        yield Finding("device cuda", f"{find_gpu()}: bf16 by Triton kernels, if asked for (weir up --device cuda)")
    except DeviceMissing as missing:
        yield Finding("device cuda", str(missing), "note")
    else:
        yield from _kernels(lambda: check_triton_cache(os.environ))


def _kernels(check: Callable[[], None]) -> Iterator[Finding]:
    try:
        check()
    except UntrustedFolder as error:
        yield Finding("kernels", error.message, "missing", "whoever could write there could run programs as this user")


def _arithmetic(cores: int, flags: set[str]) -> Iterator[Finding]:
    """Of `--device cpu --precision auto`, the default."""
    # loads the compiler's library, which no other command wants
    from weir.ops.simd.features import InstructionSet, amx_problem, cpu_features, instruction_set

    try:
        check_extra("worker", "the default")
    except ExtraMissing as missing:
        yield Finding("device cpu", missing.message, "note")
        return
    threads = f"workers share {cores} threads as they are busy"
    yield from _kernels(check_kernels)
    try:
        yield Finding("device cpu", f"the default: int8, {instruction_set()} kernels; {threads}")
    except ValueError as error:
        yield Finding("device cpu", str(error), "missing", "unset WEIR_CPU_KERNELS")
    if "amx_int8" in flags or InstructionSet.AMX in cpu_features().instruction_sets:
        problem = amx_problem()
        if problem is not None:
            yield Finding("AMX", f"not used: {problem}", "note")


def _cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()


def _memory() -> Iterator[Finding]:
    available_gib = available_bytes() / _GIB
    enough = available_gib >= _LEAST_MEMORY_GIB
    yield Finding(
        "memory",
        f"{available_gib:.1f} GiB available",
        "ok" if enough else "warning",
        "" if enough else f"a stack of two workers wants about {_LEAST_MEMORY_GIB} GiB; use a smaller --arena-bytes",
    )
    shm = shutil.disk_usage("/dev/shm")
    least_gib = default_shm_bytes() / _GIB
    enough = shm.free / _GIB >= least_gib
    yield Finding(
        "/dev/shm",
        f"{shm.free / _GIB:.1f} GiB free of {shm.total / _GIB:.1f}; a stack of the default model wants {least_gib:.1f}",
        "ok" if enough else "warning",
        ""
        if enough
        else "a stack takes less, and shortens contexts where it must; to have more: mount -o remount,size=4g /dev/shm",
    )
    left = [path.name for path in Path("/dev/shm").glob("weir-*")]
    if left:
        remedy = "of running instances, or of one that was killed: weir down --instance NAME removes it"
        yield Finding("segments", " ".join(left), "note", remedy)


def default_shm_bytes() -> int:
    """Of a stack of the default model: the arena, and what its decode worker swaps out."""
    from weir.kv.arena_size import shm_bytes_for, wanted_arena_bytes
    from weir.kv.geometry import ArenaGeometry
    from weir.model.files.dummy import shape_named
    from weir.model.precision import page_geometry

    shape = shape_named(_DEFAULT_SHAPE)
    page_bytes = page_geometry(shape, "int8").page_bytes
    return shm_bytes_for(wanted_arena_bytes(ArenaGeometry(page_bytes, 0, NUM_SLOTS, shape.max_context_tokens)))


def _open_files() -> Finding:
    """Every process asks for the hard limit at its start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = ["no limit" if limit == resource.RLIM_INFINITY else f"{limit}" for limit in (soft, hard)]
    found = f"{shown[1]} at most ({shown[0]} here; each process raises its own); a gateway needs {NUM_DESCRIPTORS}"
    if hard == resource.RLIM_INFINITY or hard >= NUM_DESCRIPTORS:
        return Finding("open files", found)
    remedy = "connections beyond it fail: raise the hard limit (`ulimit -Hn`, LimitNOFILE=, Compose's ulimits)"
    return Finding("open files", found, "warning", remedy)


def _programs() -> Iterator[Finding]:
    for package in _PACKAGES:
        try:
            yield Finding(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            yield Finding(package, "not installed", "missing", f"pip install {DISTRIBUTION}")
    for package in _WORKER_PACKAGES:
        try:
            yield Finding(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            remedy = f"workers need it, other parts do not: {install_command('worker')}"
            yield Finding(package, "not installed", "note", remedy)
    try:
        yield Finding("nats-server", str(find_nats_server()))
    except NatsServerMissing as error:
        yield Finding("nats-server", "not found", "missing", str(error))


def _model() -> Iterator[Finding]:
    for name, entry in CATALOG.items():
        path = entry.path_in(model_cache_dir())
        if path.is_file():
            yield Finding(f"model {name}", str(path))
        else:
            yield Finding(
                f"model {name}", f"not in {model_cache_dir()}", "note", f"weir pull {name}; weir up does it too"
            )


def _ports() -> Iterator[Finding]:
    for name, port in _PORTS.items():
        with socket.socket() as probe:
            is_busy = probe.connect_ex(("127.0.0.1", port)) == 0
        flag = f"--{name.lower()}-port"
        if is_busy:
            yield Finding(
                f"{name} port", f"{port} is in use", "note", f"by a stack that runs, or choose another: {flag}"
            )
        else:
            yield Finding(f"{name} port", f"{port} is free")
