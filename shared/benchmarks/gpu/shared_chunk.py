"""Pages of a chunk from which nothing is sampled, read by another process as soon as its step is done.

A step that samples waits for its tokens. One that does not must wait for its pages all the same: other processes, whose
streams wait for none of this one's, get them right after.
"""

import multiprocessing
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch

from benchmarks.gpu.model import CudaKind
from benchmarks.gpu.output import Record
from weir.engine.plan import ChunkPlan, StepPlan
from weir.kv.geometry import num_pages_for
from weir.kv.memory.device import send_memory
from weir.model.triton.memory import memory_tensor

_DEVICE = torch.device("cuda", 0)
_READY_S = 60.0
_STEP_S = 20.0
_SETTLE_S = 0.05


def look_at_unsampled_chunks(kind: CudaKind, num_pages: int, chunk_tokens: int, num_looks: int) -> Iterator[Record]:
    """`num_looks` chunks, each into pages of its own. A page that changes after its step was done is a failure."""
    memory = kind.create_memory(num_pages * kind.page_bytes)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    sending, receiving = socket.socketpair()
    writer = context.Process(
        target=_write_chunks, args=(kind, num_pages, chunk_tokens, num_looks, theirs, receiving), daemon=True
    )
    try:
        writer.start()
        receiving.close()
        theirs.close()
        with sending:
            send_memory(sending, memory)
        num_late, num_empty = _look(memory_tensor(memory, _DEVICE)[: num_pages * kind.page_bytes], ours, num_looks)
    finally:
        writer.kill()
        writer.join()
        torch.cuda.synchronize()
        memory.close()
    yield {
        "verdict": "failed" if num_late or num_empty else "ok",
        "looks": num_looks,
        "written_after_the_step": num_late,
        "never_written": num_empty,
    }


def _look(memory: torch.Tensor, connection: Connection, num_looks: int) -> tuple[int, int]:
    """How many chunks were written after their step was done, and how many never."""
    memory.zero_()
    torch.cuda.synchronize()
    _expect(connection, "ready", _READY_S)
    num_late = num_empty = 0
    for number in range(num_looks):
        connection.send(number)
        _expect(connection, "done", _STEP_S)
        begin, end = connection.recv()
        at_once = memory[begin:end].clone()
        torch.cuda.synchronize()
        time.sleep(_SETTLE_S)
        later = memory[begin:end].clone()
        num_late += not torch.equal(at_once, later)
        num_empty += not bool(later.any())
    return num_late, num_empty


def _expect(connection: Connection, wanted: str, within_s: float) -> None:
    if not connection.poll(within_s):
        raise RuntimeError(f"the writing process was not {wanted} within {within_s:.0f} s")
    said = connection.recv()
    if said != wanted:
        raise RuntimeError(f"the writing process said {said!r}, expected {wanted!r}")


def _write_chunks(
    kind: CudaKind,
    num_pages: int,
    chunk_tokens: int,
    num_looks: int,
    connection: Connection,
    memory_socket: socket.socket,
) -> None:
    """The other process: a step when it is told to."""
    with memory_socket:
        memory = kind.receive_memory(memory_socket)
    runner, warm_up = kind.make_runner(memory, num_pages)
    pages_each = num_pages_for(chunk_tokens)
    if num_looks * pages_each > num_pages:
        raise ValueError(f"{num_looks} chunks of {pages_each} pages: there are {num_pages}")
    warm_up()
    connection.send("ready")
    for _ in range(num_looks):
        number = connection.recv()
        table = tuple(range(number * pages_each, (number + 1) * pages_each))
        token_ids = tuple((7 * position + number) % kind.vocab_size for position in range(chunk_tokens))
        runner.run(StepPlan(number, (ChunkPlan(0, 0, token_ids, table, None),)))
        connection.send("done")
        connection.send((table[0] * kind.page_bytes, (table[-1] + 1) * kind.page_bytes))
    connection.recv()  # until the other process has looked: it ends this one
