"""The other process of `benchmarks.gpu.driver`, on the driver alone: a second with torch would be five.

`python -m benchmarks.gpu.driver_child ACTION FD NUM_BYTES`. FD is of the memory, or for `create` of a socket. It writes
a line when it is done, or has begun, and ends when its standard input does.
"""

import ctypes
import socket
import sys
from ctypes import byref, c_size_t, c_uint, c_void_p

from weir.kv.memory.cuda import CudaDriver, CudaMemory
from weir.kv.memory.device import send_memory

BEFORE, AFTER, LEFT = 0x11111111, 0x22222222, 0x33333333
"""What the other process has written, what this one answers, and what one that is killed leaves."""

ENDLESS_PTX = """
.version 7.0
.target sm_80
.address_size 64

.visible .entry write_without_end(.param .u64 p_words, .param .u32 num_words)
{
    .reg .pred %p<2>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<4>;

    ld.param.u64 %rd1, [p_words];
    ld.param.u32 %r1, [num_words];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    mov.u32 %r6, %nctaid.x;
    mul.lo.u32 %r6, %r6, %r3;
    mov.u32 %r7, 0;
round:
    add.u32 %r7, %r7, 1;
    mov.u32 %r8, %r5;
word:
    setp.ge.u32 %p1, %r8, %r1;
    @%p1 bra round;
    mul.wide.u32 %rd2, %r8, 4;
    add.u64 %rd3, %rd1, %rd2;
    st.volatile.global.u32 [%rd3], %r7;
    add.u32 %r8, %r8, %r6;
    bra word;
}
"""
"""Each thread writes every so many words, again and again, each round another number."""

_NUM_BLOCKS, _NUM_THREADS = 64, 256


def read_bytes(driver: CudaDriver, pointer: int, num_bytes: int) -> bytes:
    target = (ctypes.c_ubyte * num_bytes)()
    driver.call("cuMemcpyDtoH_v2", target, c_void_p(pointer), c_size_t(num_bytes))
    return bytes(target)


def fill(driver: CudaDriver, memory: CudaMemory, word: int) -> None:
    """Done when it returns."""
    driver.call("cuMemsetD32_v2", c_void_p(memory.pointer), c_uint(word), c_size_t(memory.num_bytes // 4))
    driver.call("cuCtxSynchronize")


def is_filled(driver: CudaDriver, memory: CudaMemory, word: int) -> bool:
    found = read_bytes(driver, memory.pointer, memory.num_bytes)
    return found == word.to_bytes(4, "little") * (memory.num_bytes // 4)


def _write_by_memsets(driver: CudaDriver, memory: CudaMemory) -> None:
    """Launches faster than the device fills, so that hundreds wait there when the process is killed."""
    pointer, num_words, word = c_void_p(memory.pointer), c_size_t(memory.num_bytes // 4), 0
    while True:
        word = (word + 1) % (1 << 32)
        driver.call("cuMemsetD32Async", pointer, c_uint(word), num_words, c_void_p(None))
        if word == 1:
            _say("writing")


def _write_by_an_endless_kernel(driver: CudaDriver, memory: CudaMemory) -> None:
    module, function = c_void_p(), c_void_p()
    driver.call("cuModuleLoadData", byref(module), ENDLESS_PTX.encode())
    driver.call("cuModuleGetFunction", byref(function), module, b"write_without_end")
    arguments = (ctypes.c_uint64(memory.pointer), c_uint(memory.num_bytes // 4))
    pointers = (c_void_p * 2)(*(ctypes.addressof(each) for each in arguments))
    shape = [c_uint(number) for number in (_NUM_BLOCKS, 1, 1, _NUM_THREADS, 1, 1, 0)]
    driver.call("cuLaunchKernel", function, *shape, c_void_p(None), pointers, c_void_p(None))
    _say("writing")
    driver.call("cuCtxSynchronize")  # never returns


def _say(text: str) -> None:
    print(text, flush=True)


def main(action: str, fd: int, num_bytes: int) -> int:
    driver = CudaDriver.load()
    if action == "create":
        memory = CudaMemory.create(num_bytes, driver=driver)
        fill(driver, memory, LEFT)
        with socket.socket(fileno=fd) as connection:
            send_memory(connection, memory)
        _say("sent")
        sys.stdin.readline()
        return 0
    memory = CudaMemory.open(fd, num_bytes, driver=driver)
    if action == "answer":
        is_right = is_filled(driver, memory, BEFORE)
        fill(driver, memory, AFTER)
        memory.close()
        _say("answered" if is_right else "what the other process wrote is not there")
        return 0 if is_right else 1
    sys.stdin.readline()
    if action == "memsets":
        _write_by_memsets(driver, memory)
    _write_by_an_endless_kernel(driver, memory)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
