"""Writes after a process's exit are seen, by the measurement that a GPU machine makes; here pages are the host's."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu.driver_child import ENDLESS_PTX
from benchmarks.gpu.fence_race import WriterFailed, race
from weir.kv.memory.device import HostMemory

NUM_BYTES = 1 << 16

WRITER = """
import mmap, subprocess, sys, time
pages = mmap.mmap(int(sys.argv[1]), 0)
def write():
    ends_at_s = time.monotonic() + 6
    while time.monotonic() < ends_at_s:
        pages[:4096] = bytes([time.monotonic_ns() // 1000 % 256]) * 4096
"""
BEGIN = "sys.stdin.readline(); print('writing', flush=True)"
ALONE = f"{WRITER}\n{BEGIN}\nwrite()"
# as a driver that ends a process's work late would: something writes on when the process is gone
BY_ANOTHER = f"""{WRITER}
{BEGIN}
command = [sys.executable, "-c", {WRITER!r} + "write()", sys.argv[1]]
subprocess.Popen(command, pass_fds=[int(sys.argv[1])], stdout=subprocess.DEVNULL).wait()
"""
SILENT = "import sys; sys.stdin.readline(); sys.exit(3)"


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    memory = HostMemory.create(NUM_BYTES)
    yield memory
    memory.close()


def start(code: str, memory: HostMemory) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", code, str(memory.fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[memory.fd],
    )


def test_pages_of_the_host_stay_as_they_are_once_their_writer_has_exited(memory: HostMemory) -> None:
    found = list(race(lambda: start(ALONE, memory), lambda: bytes(memory.buffer[:]), num_rounds=3, max_s=60.0))
    assert [each.num_changed_bytes for each in found] == [0, 0, 0]


def test_a_write_after_the_exit_is_counted(memory: HostMemory) -> None:
    (found,) = race(lambda: start(BY_ANOTHER, memory), lambda: bytes(memory.buffer[:]), num_rounds=1, max_s=60.0)
    assert found.num_changed_bytes > 0


def test_a_writer_that_ends_instead_of_writing_is_an_error(memory: HostMemory) -> None:
    with pytest.raises(WriterFailed, match="has written nothing"):
        list(race(lambda: start(SILENT, memory), lambda: bytes(memory.buffer[:]), num_rounds=1, max_s=60.0))


def test_the_kernel_that_never_ends_is_assembled_for_every_gpu(tmp_path: Path) -> None:
    triton = pytest.importorskip("triton", reason="Triton brings the assembler")
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    source = tmp_path / "endless.ptx"
    source.write_text(ENDLESS_PTX)
    for arch in ("sm_80", "sm_90", "sm_100"):
        command = [str(ptxas), f"-arch={arch}", str(source), "-o", str(tmp_path / arch)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
