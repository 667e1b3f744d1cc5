"""`make gpu`: everything that needs a GPU, part by part, in ten minutes. `make gpu PART=step` runs one part alone.

Runs with what a bare GPU machine has: the `python3` on the PATH, torch, Triton, numpy, grpcio, msgpack, tokenizers,
safetensors, pytest. Nothing is installed and nothing is fetched. Six files go to the folder `$OUT`
(`benchmarks.gpu.output`). It is started in the root of a checkout, where the tests are.
"""

import argparse
import importlib.util
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.output import SUMMARY, begin_files
from benchmarks.gpu.parts import CASES, chosen, parts_of
from benchmarks.gpu.session import Budget, Part, Session

_BUDGET_S = 560.0
"""Of all parts together, from the start of this program."""
_PROBE_S = 120.0
_NVIDIA_DEVICE = Path("/dev/nvidiactl")
"""Where it is, a GPU that cannot be used is a failure."""


def try_reason_to_skip() -> str | None:
    """Why nothing can run here."""
    missing = [name for name in ("torch", "triton", "pytest", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed for {sys.executable}"
    probe = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    try:
        found = subprocess.run(
            [sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=_PROBE_S
        )
    except subprocess.TimeoutExpired:
        return f"PyTorch did not say within {_PROBE_S:.0f} s whether there is a GPU"
    if found.returncode != 0:
        return f"PyTorch cannot be asked for a GPU: {found.stderr.strip()[-600:]}"
    if not found.stdout.strip():
        return "PyTorch finds no CUDA device"
    return None


def run(parts: Sequence[Part], root: Path, out: Path, budget: Budget, title: str) -> int:
    """0 if every part ended well or was left out; what is known is in `out` at any moment."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a process that is ended by SIGABRT leaves no core
    logs = begin_files(out)
    paths = [str(root / "shared"), str(root / "services"), str(root), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    environ.pop("TRITON_INTERPRET", None)  # kernels are to run on the GPU
    session = Session(out, logs, environ, title)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: session.stop())
    outcomes = session.run(parts, budget)
    print((out / SUMMARY).read_text())
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


def main() -> int:
    """0 also if there is no GPU; 1 if something failed, or a GPU that is there cannot be used; 2 for a wrong folder or
    part."""
    budget = Budget(time.monotonic() + _BUDGET_S)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="", help="names of parts; all, if empty")
    arguments = parser.parse_args()
    root = Path.cwd()
    if not (root / CASES).is_dir():
        print(f"make gpu: {root} has no {CASES}: start it in the root of a checkout of Weir")
        return 2
    try:
        parts = chosen(parts_of(root), arguments.part)
    except ValueError as error:
        print(f"make gpu: {error}")
        return 2
    reason = try_reason_to_skip()
    if reason is not None:
        print(f"make gpu: nothing to run: {reason}. The kernels' interpreter and compile tests need none: make test.")
        return 1 if _NVIDIA_DEVICE.exists() else 0
    return run(parts, root, Path(os.environ.get("OUT") or root / "out"), budget, "make gpu")


if __name__ == "__main__":
    sys.exit(main())
