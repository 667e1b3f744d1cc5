"""Measures the Triton kernels of `cases` and puts the figures into a table."""

import dataclasses
import importlib.metadata
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu.cases import full_width, one_byte
from benchmarks.gpu.cases.full_width import KernelCase
from benchmarks.gpu.timer import Ceilings, CudaTimer, Timer, Timing, measure_ceilings
from weir.ops.gpu.decode_work import DecodeTiles

MAX_ERROR = 2e-2
"""Of the reference's greatest value; bf16 has 8 bits."""
_SHOWN_TILES = 12


@dataclass(frozen=True, slots=True)
class RivalTime:
    """`median_us` None: `problem` says why it did not run."""

    name: str
    median_us: float | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel on one shape. `floor_us`: what its bytes or operations take at the least.

    `timing` None: its results are off by `error`, or not numbers, and were not timed.
    """

    op: str
    shape: str
    num_bytes: int
    num_flops: int
    error: float
    floor_us: float
    timing: Timing | None
    rivals: tuple[RivalTime, ...]

    @property
    def floor_share(self) -> float:
        return 0.0 if self.timing is None else self.floor_us / self.timing.median_us


@dataclass(frozen=True, slots=True)
class KernelReport:
    """Everything measured in one run."""

    device: str
    versions: str
    ceilings: Ceilings
    kernels: tuple[KernelTime, ...]

    @property
    def is_right(self) -> bool:
        return all(kernel.timing is not None for kernel in self.kernels)


def run_gpu_kernels() -> KernelReport:
    """On the current CUDA device; takes a minute or two, most of it compiling."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    major, minor = torch.cuda.get_device_capability()
    timer = CudaTimer()
    ceilings = measure_ceilings(timer)
    return KernelReport(
        torch.cuda.get_device_name(),
        f"torch {torch.__version__}, Triton {importlib.metadata.version('triton')}",
        ceilings,
        tuple(measure(makers_of_cases(device, 10 * major + minor), timer, ceilings)),
    )


def makers_of_cases(device: torch.device, compute_capability: int) -> list["partial[KernelCase]"]:
    """Makers, so that a case's memory is free before the next is made.

    Few have rivals: FlexAttention compiles for ten seconds or more a shape.
    """
    decode = partial(full_width.decode_case, device=device)
    prefill = partial(full_width.prefill_case, device=device, compute_capability=compute_capability)
    ragged = [int(length) for length in torch.linspace(64, 4096, 64)]
    return [
        partial(decode, full_width.LLAMA_8B, [4096], with_rivals=True),
        partial(decode, full_width.LLAMA_8B, [2048] * 8),
        partial(decode, full_width.LLAMA_8B, [512] * 64),
        partial(decode, full_width.LLAMA_8B, [2048] * 32, with_rivals=True),
        partial(decode, full_width.LLAMA_8B, [2048] * 128),
        partial(decode, full_width.LLAMA_8B, [16384] * 16),
        partial(decode, full_width.LLAMA_8B, ragged),
        partial(decode, full_width.SMOLLM, [2048] * 64),
        partial(one_byte.int8_decode_case, full_width.LLAMA_8B, [2048] * 32, device),
        partial(prefill, full_width.LLAMA_8B, 2048, [2048]),
        partial(prefill, full_width.LLAMA_8B, 4096, [4096], with_rivals=True),
        partial(prefill, full_width.LLAMA_8B, 512, [512] * 8),
        partial(prefill, full_width.LLAMA_8B, 512, [4096] * 4),
        partial(prefill, full_width.SMOLLM, 2048, [2048] * 4),
        partial(full_width.norm_case, 64, 4096, device),
        partial(full_width.norm_case, 8192, 4096, device),
        partial(full_width.silu_case, 64, 14336, device),
        partial(full_width.silu_case, 8192, 14336, device),
        partial(full_width.rotary_case, full_width.LLAMA_8B, 64, device),
        partial(full_width.rotary_case, full_width.LLAMA_8B, 8192, device),
        partial(one_byte.fp8_product_case, 8, 28672, 4096, device),
        partial(one_byte.fp8_product_case, 128, 28672, 4096, device),
        partial(full_width.sampling_case, 64, 128256, device),
    ]


def measure(makers: Iterable[Callable[[], KernelCase]], timer: Timer, ceilings: Ceilings) -> Iterable[KernelTime]:
    """A case that computes something else than its reference is reported, not timed."""
    for make in makers:
        case = make()
        rivals = tuple(time_rival(name, rival, timer) for name, rival in case.rivals.items())
        yield dataclasses.replace(measure_own(case, timer, ceilings), rivals=rivals)


def measure_own(case: KernelCase, timer: Timer, ceilings: Ceilings) -> KernelTime:
    """Without its rivals."""
    error = case.error()
    is_right = error <= MAX_ERROR  # False for NaN
    floor_us = ceilings.floor_us(case.num_bytes, case.num_flops)
    timing = timer.time(case.run) if is_right else None
    return KernelTime(case.op, case.shape, case.num_bytes, case.num_flops, error, floor_us, timing, ())


def time_rival(name: str, make: Callable[[], Callable[[], object]], timer: Timer) -> RivalTime:
    """Whatever keeps a rival from running is said in its `problem`."""
    try:
        return RivalTime(name, timer.time(make()).median_us)
    except Exception as problem:  # noqa: BLE001  a rival may lack a package, a compiler, or this GPU: the table says so
        first_line = (str(problem).splitlines() or [""])[0]
        return RivalTime(name, None, f"{type(problem).__name__}: {first_line}"[:120])


def sweep_decode(lengths: list[int]) -> list[tuple[float, DecodeTiles]]:
    """(median us, tiles) of paged decode of the 8B shape over tile sizes, fastest first: how `decode_tiles` is chosen.

    Sizes that a GPU has no room for are left out.
    """
    timer = CudaTimer()
    found = []
    for block, warps, stages, programs in itertools.product((32, 64), (1, 2, 4), (3, 5, 7), (3, 6, 8)):
        tiles = DecodeTiles(256, block, warps, stages, programs)
        case = full_width.decode_case(full_width.LLAMA_8B, lengths, torch.device("cuda"), tiles=tiles)
        try:
            found.append((timer.time(case.run).median_us, tiles))
        except Exception as problem:
            if type(problem).__name__ != "OutOfResources":
                raise
    return sorted(found, key=lambda entry: entry[0])[:_SHOWN_TILES]


def as_json(report: KernelReport) -> dict[str, object]:
    """The report's fields, and of each kernel its share of the floor."""
    kernels = [dataclasses.asdict(kernel) | {"floor_share": kernel.floor_share} for kernel in report.kernels]
    return dataclasses.asdict(report) | {"kernels": kernels}


def as_lines(report: KernelReport) -> list[str]:
    """A table in plain text."""
    ceilings = report.ceilings
    lines = [
        f"{report.device}, {report.versions}; copy {ceilings.copy_bytes_a_second / 1e9:.0f} GB/s, "
        f"bf16 product {ceilings.matmul_flops_a_second / 1e12:.0f} TFLOP/s",
        f"{'kernel':20} {'shape':24} {'us':>9} {'fast':>9} {'slow':>9} {'GB/s':>6} {'TFLOP/s':>7} {'of floor':>8}  "
        "rivals",
    ]
    return lines + [_line(kernel) for kernel in report.kernels]


def _line(kernel: KernelTime) -> str:
    rivals = "; ".join(_rival_text(rival, kernel.timing) for rival in kernel.rivals)
    if kernel.timing is None:
        return f"{kernel.op:20} {kernel.shape:24} WRONG: off by {kernel.error:.3g} of the greatest value  {rivals}"
    median_us = kernel.timing.median_us
    return (
        f"{kernel.op:20} {kernel.shape:24} {median_us:9.1f} {kernel.timing.fast_us:9.1f} "
        f"{kernel.timing.slow_us:9.1f} {kernel.num_bytes / median_us / 1e3:6.0f} "
        f"{kernel.num_flops / median_us / 1e6:7.1f} {kernel.floor_share:8.0%}  {rivals}"
    )


def _rival_text(rival: RivalTime, own: Timing | None) -> str:
    if rival.median_us is None:
        return f"{rival.name}: {rival.problem}"
    ratio = "" if own is None else f" ({rival.median_us / own.median_us:.2f}x)"
    return f"{rival.name} {rival.median_us:.1f}{ratio}"


def tile_lines(found: Sequence[tuple[float, DecodeTiles]]) -> list[str]:
    return [f"{median_us:9.1f} us  {tiles}" for median_us, tiles in found]
