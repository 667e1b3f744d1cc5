"""`make gpu`: everything that needs a GPU, one part after the other, each in a process of its own.

Runs with what a bare GPU machine has: the `python3` on the PATH, torch, Triton, numpy, grpcio, msgpack, tokenizers,
safetensors, pytest. Nothing is installed and nothing is fetched. Tables go to the folder `$OUT`.
It is started in the root of a checkout, where the tests are.
"""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_KERNEL_TESTS = "tests/kernels"
_BUDGET_S = 470.0
"""Of all parts together. A part that would start later is skipped; one that runs then is ended."""


@dataclass(frozen=True, slots=True)
class Part:
    """One command. It writes its tables into the folder itself; what it prints is shown and kept."""

    name: str
    arguments: tuple[str, ...]
    max_s: float


@dataclass(frozen=True, slots=True)
class PartOutcome:
    """How a part ended: ok, failed, ended at its time limit, or skipped."""

    name: str
    verdict: str
    seconds: float


def parts_of(out: Path) -> tuple[Part, ...]:
    """In the order of what must be known first."""
    # not the folder: its other modules import what only the project's own environment has
    gpu_tests = "tests/kernels/test_triton_gpu.py"
    pytest = ("-m", "pytest", "-c", "tests/kernels/gpu.ini", "--rootdir", ".", "-m", "gpu", "-q", gpu_tests)
    return (
        Part("tests", pytest, max_s=180.0),
        Part("pair", ("-m", "benchmarks.gpu.cuda_pair", "--out", str(out / "pair.json")), max_s=90.0),
        Part("kernels", ("-m", "benchmarks.kernels", "--out", str(out / "kernels.json")), max_s=150.0),
        Part("step", ("-m", "benchmarks.gpu.step", "--out", str(out / "step.json")), max_s=150.0),
    )


def try_reason_to_skip() -> str | None:
    """Why nothing can run here."""
    missing = [name for name in ("torch", "triton", "pytest", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed for {sys.executable}"
    probe = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=120)
    if not found.stdout.strip():
        return "PyTorch finds no CUDA device"
    print(f"GPU: {found.stdout.strip()}", flush=True)
    return None


def run_parts(parts: Sequence[Part], out: Path, environ: Mapping[str, str], budget_s: float) -> list[PartOutcome]:
    """Runs them in turn within `budget_s`; the output of each is shown and kept as `<name>.log` in `out`."""
    ends_at_s = time.monotonic() + budget_s
    outcomes = []
    for part in parts:
        left_s = ends_at_s - time.monotonic()
        if left_s < 1.0:
            outcomes.append(PartOutcome(part.name, "skipped: no time left", 0.0))
            continue
        print(f"== {part.name}: python3 {' '.join(part.arguments)}", flush=True)
        outcomes.append(_run(part, out, environ, min(part.max_s, left_s)))
    return outcomes


def _run(part: Part, out: Path, environ: Mapping[str, str], limit_s: float) -> PartOutcome:
    started_s = time.monotonic()
    log = out / f"{part.name}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, *part.arguments],
            env=dict(environ),
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            verdict = "ok" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            verdict = f"ended at its limit of {limit_s:.0f} s"
        finally:
            _end_group(process)
    print(log.read_text(errors="replace"), flush=True)
    return PartOutcome(part.name, verdict, time.monotonic() - started_s)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """A part may have started processes of its own."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        return
    process.wait()


def main() -> int:
    """0 if every part ended well, or if there is no GPU; 2 if it was started somewhere else."""
    root = Path.cwd()
    if not (root / _KERNEL_TESTS).is_dir():
        print(f"make gpu: {root} has no {_KERNEL_TESTS}: start it in the root of a checkout of Weir")
        return 2
    reason = try_reason_to_skip()
    if reason is not None:
        print(f"make gpu: nothing to run: {reason}. The kernels' interpreter and compile tests need none: make test.")
        return 0
    out = Path(os.environ.get("OUT") or root / "out")
    out.mkdir(parents=True, exist_ok=True)
    paths = [str(root / "shared"), str(root / "services"), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    outcomes = run_parts(parts_of(out), out, environ, _BUDGET_S)
    lines = [f"| {outcome.name} | {outcome.verdict} | {outcome.seconds:.0f} s |" for outcome in outcomes]
    table = "\n".join(["| part | verdict | time |", "|---|---|---|", *lines])
    (out / "summary.md").write_text(table + "\n")
    print(table)
    return 0 if all(outcome.verdict == "ok" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
