"""What page memory on a GPU stands on, each alone: driver calls, two processes, PyTorch's views, a killed writer."""

import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t
from dataclasses import dataclass
from functools import partial

from benchmarks.gpu.case_loop import CaseLoop, CaseSkipped
from benchmarks.gpu.driver_child import AFTER, BEFORE, LEFT, fill, is_filled, read_bytes
from benchmarks.gpu.fence_race import race
from benchmarks.gpu.output import Record
from weir.kv.memory.cuda import CudaDriver, CudaMemory
from weir.kv.memory.device import receive_memory

_NUM_BYTES = 32 << 20
_LOOKED_AT_BYTES = 8 << 20
_CHILD_S = 15.0
_NUM_ROUNDS = 10
_RACE_S = 9.0


@dataclass(frozen=True, slots=True)
class LoggedDriver(CudaDriver):
    """Says each call and what came of it."""

    def call(self, name: str, *arguments: object) -> None:
        try:
            CudaDriver.call(self, name, *arguments)
        except Exception as error:
            print(f"{name}: {error}", flush=True)
            raise
        print(f"{name}: ok", flush=True)


def _driver_and_memory() -> Iterator[Record]:
    driver = LoggedDriver.load()
    version, free, total = c_int(), c_size_t(), c_size_t()
    driver.call("cuDriverGetVersion", byref(version))
    memory = CudaMemory.create(1, driver=driver)
    driver.call("cuMemGetInfo_v2", byref(free), byref(total))
    fill(driver, memory, BEFORE)
    if not is_filled(driver, memory, BEFORE):
        raise RuntimeError("the memory does not hold what was written to it")
    granularity = memory.num_bytes
    memory.close()
    yield {
        "driver": version.value,
        "granularity_kib": granularity >> 10,
        "free_gib": free.value / 2**30,
        "total_gib": total.value / 2**30,
    }


@contextmanager
def _child(action: str, fd: int) -> "Iterator[subprocess.Popen[bytes]]":
    process = _start(action, fd)
    try:
        yield process
    finally:
        process.kill()
        process.wait(_CHILD_S)


def _start(action: str, fd: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.driver_child", action, str(fd), str(_NUM_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[fd],
    )


def _two_processes() -> Iterator[Record]:
    driver = LoggedDriver.load()
    memory = CudaMemory.create(_NUM_BYTES, driver=driver)
    fill(driver, memory, BEFORE)
    with _child("answer", memory.fd) as process:
        said = process.communicate(timeout=_CHILD_S)[0].decode().strip()
    if process.returncode != 0 or not is_filled(driver, memory, AFTER):
        raise RuntimeError(f"the other process ended with {process.returncode}: {said}")
    memory.close()
    return iter(())


def _killed_creator() -> Iterator[Record]:
    driver = LoggedDriver.load()
    ours, theirs = socket.socketpair()
    with ours, theirs, _child("create", theirs.fileno()) as process:
        theirs.close()
        ours.settimeout(_CHILD_S)
        memory = receive_memory(ours, partial(CudaMemory.open, driver=driver))
        process.send_signal(signal.SIGKILL)
        process.wait(_CHILD_S)
    if not is_filled(driver, memory, LEFT):
        raise RuntimeError("what the killed process wrote is not there any more")
    memory.close()
    return iter(())


def _pages_through_the_host() -> Iterator[Record]:
    """As pages go to another host and come from there: by a thread that has used no GPU so far."""
    memory = CudaMemory.create(_NUM_BYTES, driver=LoggedDriver.load())
    there, back = memory.host_buffer(_NUM_BYTES), memory.host_buffer(_NUM_BYTES)
    there[:] = random.Random(7).randbytes(_NUM_BYTES)
    took_s: dict[str, float] = {}

    def copy() -> None:
        for _ in range(2):  # the first time is not what it takes
            began_s = time.monotonic()
            memory.write(0, there)
            took_s["write"] = time.monotonic() - began_s
            began_s = time.monotonic()
            memory.read(0, back)
            took_s["read"] = time.monotonic() - began_s

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join(_CHILD_S)
    is_same = bytes(there) == bytes(back)
    rates = {f"{name}_gb_s": _NUM_BYTES / 1e9 / seconds for name, seconds in took_s.items()}
    yield {"verdict": "ok" if is_same and len(took_s) == 2 else "failed", "is_same": is_same, **rates}
    memory.close()


def _view(make: str) -> Iterator[Record]:
    """A tensor over the memory is a view of it: what one writes the other reads."""
    import torch  # noqa: PLC0415 - seconds, in which the cases before it have long ended
    from torch.utils.dlpack import from_dlpack  # noqa: PLC0415

    from weir.model.triton.memory import memory_tensor  # noqa: PLC0415

    device = torch.device("cuda", 0)
    driver = LoggedDriver.load()
    memory = CudaMemory.create(_NUM_BYTES, driver=driver)
    makers: dict[str, Callable[[], torch.Tensor]] = {
        "as_tensor": lambda: torch.as_tensor(memory, device=device),
        "from_dlpack": lambda: from_dlpack(memory),
        "memory_tensor": lambda: memory_tensor(memory, device),
    }
    tensor = makers[make]()
    tensor.fill_(7)
    torch.cuda.synchronize()
    is_view = tensor.data_ptr() == memory.pointer and is_filled(driver, memory, 0x07070707)
    yield {"verdict": "ok" if is_view else "failed", "device": str(tensor.device), "is_view": is_view}
    del tensor
    torch.cuda.synchronize()
    memory.close()


def _fence_race(action: str) -> Iterator[Record]:
    driver = CudaDriver.load()
    memory = CudaMemory.create(_NUM_BYTES, driver=driver)
    rounds = list(
        race(
            partial(_start, action, memory.fd),
            lambda: read_bytes(driver, memory.pointer, _LOOKED_AT_BYTES),
            _NUM_ROUNDS,
            _RACE_S,
        )
    )
    memory.close()
    if not rounds:
        raise CaseSkipped("no round was begun in time")
    num_late = sum(each.num_changed_bytes > 0 for each in rounds)
    yield {
        "verdict": "failed" if num_late else "ok",
        "rounds": len(rounds),
        "rounds_written_after_exit": num_late,
        "most_bytes_written_after_exit": max(each.num_changed_bytes for each in rounds),
        "slowest_exit_ms": max(each.exit_ms for each in rounds),
    }


def main() -> int:
    loop = CaseLoop.from_command_line("driver", __doc__)
    loop.run("memory of one process", _driver_and_memory)
    loop.run("two processes", _two_processes)
    loop.run("pages of a killed creator", _killed_creator)
    loop.run("pages through memory of the host", _pages_through_the_host)
    for action in ("memsets", "kernel"):
        loop.run(f"fence race, {action}", partial(_fence_race, action))
    for make in ("as_tensor", "from_dlpack", "memory_tensor"):
        loop.run(f"view by {make}", partial(_view, make))
    return loop.exit_code


if __name__ == "__main__":
    sys.exit(main())
