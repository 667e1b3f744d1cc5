"""What `make gpu` runs, in which order and for how long: the most telling first."""

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.session import Command, Part

CASES = "tests/kernels/triton_cases"
PYTEST = ("-m", "pytest", "-c", "tests/kernels/gpu.ini", "--rootdir", ".", "-q", "-p", "benchmarks.gpu.pytest_cases")
_MOST_FILES_AT_A_TIME = 8


def parts_of(root: Path) -> tuple[Part, ...]:
    """For a checkout at `root`."""
    case_files = sorted((root / CASES).glob("case_*.py"))
    tests = tuple(Command(path.stem, (*PYTEST, str(path.relative_to(root)))) for path in case_files)
    return (
        _of_one_module("env", "benchmarks.gpu.environment", max_s=20.0),
        _of_one_module("driver", "benchmarks.gpu.driver", max_s=35.0),
        _of_one_module("smoke", "benchmarks.gpu.smoke", max_s=40.0),
        _of_one_module("step-1B", "benchmarks.gpu.step", "--model-shape", "llama-3.2-1b", max_s=45.0),
        _of_one_module("step-8B", "benchmarks.gpu.step", "--model-shape", "llama-3.1-8b", max_s=100.0),
        Part("tests", tests, max_s=120.0, num_at_a_time=_files_at_a_time(), are_tests=True),
        _of_one_module("pair", "benchmarks.gpu.cuda_pair", max_s=80.0),
        _of_one_module("kernels", "benchmarks.gpu.kernel_times", max_s=90.0),
        _of_one_module("sanitizer", "benchmarks.gpu.sanitizer", max_s=45.0),
        _of_one_module("stack", "benchmarks.gpu.whole_stack", max_s=90.0),
    )


def _files_at_a_time() -> int:
    """Of tests: their processes compile for most of their time."""
    return max(2, min(_MOST_FILES_AT_A_TIME, (os.cpu_count() or 1) // 2))


def _of_one_module(name: str, module: str, *arguments: str, max_s: float) -> Part:
    return Part(name, (Command(name, ("-m", module, *arguments)),), max_s)


def chosen(parts: Sequence[Part], wanted: str) -> tuple[Part, ...]:
    """By names with spaces or commas between them; `step` is every part whose name begins with `step-`. Empty: all.

    Raises ValueError for a name that no part has.
    """
    names = wanted.replace(",", " ").split()
    for name in names:
        if not any(_is_called(part, name) for part in parts):
            known = " ".join(part.name for part in parts)
            raise ValueError(f"part {name}: there is none of that name; the parts are {known}")
    return tuple(part for part in parts if not names or any(_is_called(part, name) for name in names))


def _is_called(part: Part, name: str) -> bool:
    return part.name == name or part.name.startswith(f"{name}-")
