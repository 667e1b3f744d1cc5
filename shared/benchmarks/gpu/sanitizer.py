"""compute-sanitizer over two kernels on small shapes: reads and writes out of bounds, and races in shared memory."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.gpu.case_loop import CaseLoop, CaseSkipped
from benchmarks.gpu.output import Record

_KERNELS = ("paged_decode", "paged_prefill")
_TOOLS = ("memcheck", "racecheck")
_ERROR_EXIT = 86
_RUN_S = 40.0


def try_sanitizer() -> str | None:
    """The program: on the PATH, in the toolkit, or where CUDA's wheels put it."""
    folders = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    candidates = [Path(folder) / "bin/compute-sanitizer" for folder in folders if folder]
    candidates += [Path(folder) / "compute-sanitizer/compute-sanitizer" for folder in folders if folder]
    found = shutil.which("compute-sanitizer")
    return found or next((str(path) for path in candidates if path.is_file()), None)


def check(sanitizer: str, tool: str, kernel: str) -> Iterator[Record]:
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(_ERROR_EXIT), "--kernel-regex", f"kns={kernel}"]
    command += [sys.executable, "-m", "benchmarks.gpu.smoke", "--only", kernel]
    # memory of its own for each tensor: beside another tensor in one block, what is out of bounds is not seen
    environ = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=_RUN_S)
    print(done.stdout + done.stderr, flush=True)
    reports = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    if done.returncode not in (0, _ERROR_EXIT):
        raise RuntimeError(f"compute-sanitizer ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
    summary = reports[-1].strip("= ") if reports else "no report"
    yield {"verdict": "ok" if done.returncode == 0 else "failed", "summary": summary}


def _missing() -> Iterator[Record]:
    raise CaseSkipped("no compute-sanitizer on the PATH, in $CUDA_HOME or in /usr/local/cuda")


def main() -> int:
    loop = CaseLoop.from_command_line("sanitizer", __doc__)
    sanitizer = try_sanitizer()
    for tool in _TOOLS:
        for kernel in _KERNELS:
            loop.run(f"{tool} {kernel}", partial(check, sanitizer, tool, kernel) if sanitizer else _missing)
    return loop.exit_code


if __name__ == "__main__":
    sys.exit(main())
