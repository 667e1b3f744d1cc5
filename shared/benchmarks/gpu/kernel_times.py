"""Weir's kernels beside what their bytes take, then their rivals: `python -m benchmarks.gpu.kernel_times`.

Own kernels first, then what PyTorch has ready, then what compiles for ten seconds or more a shape.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu.case_loop import CaseLoop
from benchmarks.gpu.cases.full_width import AttentionShape, KernelCase
from benchmarks.gpu.kernels import makers_of_cases, measure_own, time_rival
from benchmarks.gpu.output import Record
from benchmarks.gpu.timer import Ceilings, CudaTimer, Timer, measure_ceilings

_SLOW_RIVAL = "FlexAttention"

Maker = Callable[[], KernelCase]


def name_of(make: "partial[KernelCase]") -> str:
    """As it is called, without its device: `decode 8B 32 x 2048`."""
    words = [_word(argument) for argument in make.args if not isinstance(argument, torch.device)]
    return " ".join([make.func.__name__.removesuffix("_case"), *words])


def _word(argument: object) -> str:
    if isinstance(argument, AttentionShape):
        return argument.name
    if isinstance(argument, list):
        lengths = f"{argument[0]}" if len(set(argument)) == 1 else f"{min(argument)}-{max(argument)}"
        return f"{len(argument)} x {lengths}"
    return str(argument)


def own(make: Maker, timer: Timer, ceilings: Ceilings) -> Iterator[Record]:
    kernel = measure_own(make(), timer, ceilings)
    timing = kernel.timing
    if timing is None:
        yield {"verdict": "failed", "problem": f"{kernel.op}: off by {kernel.error:.3g} of the greatest value"}
        return
    yield {
        "kernel": kernel.op,
        "shape": kernel.shape,
        "median_us": timing.median_us,
        "slow_us": timing.slow_us,
        "gb_a_second": kernel.num_bytes / timing.median_us / 1e3,
        "tflops": kernel.num_flops / timing.median_us / 1e6,
        "of_floor": kernel.floor_share,
        "error": kernel.error,
    }


def rivals(make: Maker, timer: Timer, *, slow: bool) -> Iterator[Record]:
    case = make()
    own_us = timer.time(case.run).median_us
    for name, make_rival in case.rivals.items():
        if name.startswith(_SLOW_RIVAL) != slow:
            continue
        rival = time_rival(name, make_rival, timer)
        found = {"rival": name, "shape": case.shape}
        if rival.median_us is None:
            yield {"verdict": "skipped", **found, "problem": rival.problem}
        else:
            yield {**found, "median_us": rival.median_us, "own_us": own_us, "times_own": rival.median_us / own_us}


def main() -> int:
    loop = CaseLoop.from_command_line("kernels", __doc__)
    torch.manual_seed(0)
    major, minor = torch.cuda.get_device_capability()
    timer = CudaTimer()
    ceilings = measure_ceilings(timer)
    loop.run("ceilings", lambda: [ceilings.as_record()])
    makers = makers_of_cases(torch.device("cuda"), 10 * major + minor)
    for make in makers:
        loop.run(name_of(make), partial(own, make, timer, ceilings))
    with_rivals = [make for make in makers if make.keywords.get("with_rivals")]
    for slow in (False, True):
        for make in with_rivals:
            loop.run(f"{'slow ' if slow else ''}rivals of {name_of(make)}", partial(rivals, make, timer, slow=slow))
    return loop.exit_code


if __name__ == "__main__":
    sys.exit(main())
