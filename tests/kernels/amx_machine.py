"""A machine with AMX for a child process: this one, or this one with an emulator of the tile instructions."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import llvmlite.binding
import pytest

from weir.ops.simd.features import InstructionSet, available_instruction_sets, cpu_features

ROOT = Path(__file__).parents[2]
EMULATOR = Path(__file__).with_name("amx_emulator.c")
HAS_AMX = InstructionSet.AMX in available_instruction_sets()


class Machine:
    """Runs Python in a child process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)

    def python(self, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """The ended process, which had 200 s. `environment` is added to this process's."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_CPU", "WEIR_CPU"))}
        paths = {"PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("shared", "services", "."))}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=kept | paths | self._environment | environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    def output_of(self, script: str, *arguments: str, **environment: str) -> str:
        """What a script prints that does not fail."""
        ran = self.python("-c", script, *arguments, **environment)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.strip()


class AmxMachine(Machine):
    """Where AMX works, over a folder of kernels of its own."""

    def __init__(self, folder: Path) -> None:
        """Skips the test where there can be no such machine."""
        self.cache = folder
        super().__init__({"WEIR_CACHE": str(folder)} | ({} if HAS_AMX else _emulated(folder)))


THIS_MACHINE = Machine({})
"""As it is, with the kernels that it has compiled."""


def _emulated(folder: Path) -> dict[str, str]:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("the emulator of AMX is for Linux on x86-64")
    if InstructionSet.AVX512_VNNI not in cpu_features().instruction_sets:
        pytest.skip("only tiles are emulated: vectors need AVX512-VNNI, which this processor lacks")
    if compiler is None:
        pytest.skip("no C compiler here: the emulator of AMX is written in C")
    library = folder / "amx_emulator.so"
    command = [compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(library), str(EMULATOR)]
    subprocess.run([*command, "-ldl"], check=True, timeout=60)
    features = llvmlite.binding.get_host_cpu_features()
    features["amx-tile"] = features["amx-int8"] = True
    return {"LD_PRELOAD": str(library), "NUMBA_CPU_FEATURES": features.flatten()}
