"""Each kernel beside what the machine can do at most and beside what else computes the same.

    PYTHONPATH=shared python3 -m benchmarks.kernels --out kernels.json

On a GPU it needs torch and Triton alone. Without one it measures the CPU's kernels.
"""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

import torch


def main(out: Path | None = None, sweep: bool = False) -> int:
    """Prints tables; writes them to `out` as JSON. Returns the exit code: 1 if a kernel's results are wrong."""
    if torch.cuda.is_available():
        return _main_gpu(out, sweep)
    print("no CUDA device here: the CPU's kernels")
    return _main_cpu(out)


def _main_gpu(out: Path | None, sweep: bool) -> int:
    from benchmarks.gpu.kernels import as_json, as_lines, run_gpu_kernels, sweep_decode, tile_lines

    if sweep:
        for lengths in ([2048] * 32, [4096], [512] * 64):
            print(f"\npaged_decode, 8B, {len(lengths)} x {lengths[0]}")
            print("\n".join(tile_lines(sweep_decode(lengths))), flush=True)
        return 0
    report = run_gpu_kernels()
    print("\n".join(as_lines(report)))
    if out is not None:
        out.write_text(json.dumps(as_json(report), indent=2))
    return 0 if report.is_right else 1


def _main_cpu(out: Path | None) -> int:
    from benchmarks.kernels import attention as cpu_attention
    from benchmarks.kernels import instruction_sets
    from benchmarks.kernels import linear as cpu_linear

    attention = cpu_attention.measure(os.cpu_count() or 1)
    print("\n".join(cpu_attention.as_lines(attention)), flush=True)
    linear = cpu_linear.run_cpu_kernels()
    print("\n".join(["", *cpu_linear.as_lines(linear)]))
    sets = instruction_sets.measure()
    print("\n".join(["", *instruction_sets.as_lines(sets)]))
    if out is not None:
        params = {
            "attention": [dataclasses.asdict(time) for time in attention],
            "linear": dataclasses.asdict(linear),
            "instruction_sets": dataclasses.asdict(sets),
        }
        out.write_text(json.dumps(params, indent=2))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    parser.add_argument("--sweep", action="store_true", help="time paged decode over tile sizes instead")
    arguments = parser.parse_args()
    sys.exit(main(arguments.out, arguments.sweep))
