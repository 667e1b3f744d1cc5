"""`python -m benchmarks.wire.null_worker`: a decode worker that computes nothing.

It gives each sequence a token a step. It stands in the registry and speaks `weir.v1.Worker` like any other, so that
gateway and scheduler cannot tell.
"""

import asyncio
import signal
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer
import uvloop

from benchmarks.wire.step_tokens import token_of_step
from weir.bus.messages import WorkerRecord
from weir.bus.nats import NatsBus
from weir.bus.subjects import Subjects
from weir.rpc.server import make_server
from weir.rpc.tls.certificates import CertificateFiles
from weir.rpc.tls.credentials import server_credentials
from weir.rpc.tls.watch import CertificateWatch
from weir.wire.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from weir.worker.bus_link import RegistryEntry

_MAX_NUM_SEQS = 1024
_NUM_PAGES = 1 << 20
_PAGE_TOKENS = 16
_MAX_CONTEXT_TOKENS = 2048
_REGISTER_TIMEOUT_S = 30.0


@dataclass(slots=True)
class _Sequence:
    """`joined_at`: the step of its first token."""

    start: worker_pb2.Start
    joined_at: int
    num_sent: int = 0


class NullEngine:
    """Sequences, and what is due of each at a time. A step that the gateway takes too late comes with the next.

    Step n is due at n * `step_s` of the monotonic clock, and its tokens say which it was.
    """

    def __init__(self, step_s: float) -> None:
        """`step_s` 0: the next step comes as soon as the gateway has taken one."""
        self._step_s = step_s
        self._step = 0
        self._sequences: dict[str, _Sequence] = {}
        self._has_work = asyncio.Event()

    def start(self, start: worker_pb2.Start) -> None:
        if not self._sequences:  # no steps are made at rest
            self._step = max(self._step, self._due_step())
        self._sequences[start.request_id] = _Sequence(start, self._step + 1)
        self._has_work.set()

    def cancel(self, request_id: str) -> None:
        self._sequences.pop(request_id, None)

    async def next_frame(self) -> worker_pb2.StepFrame:
        """Waits for the next step."""
        while True:
            if not self._sequences:
                self._has_work.clear()
                await self._has_work.wait()
            await self._next_step()
            if updates := [self._update(sequence) for sequence in list(self._sequences.values())]:
                return worker_pb2.StepFrame(step=self._step, updates=updates)

    async def _next_step(self) -> None:
        if not self._step_s:
            self._step += 1
            return
        self._step = max(self._step + 1, self._due_step())
        await asyncio.sleep(self._step * self._step_s - time.monotonic())

    def _due_step(self) -> int:
        return int(time.monotonic() / self._step_s) if self._step_s else 0

    def _update(self, sequence: _Sequence) -> worker_pb2.SequenceUpdate:
        start, first_index = sequence.start, sequence.num_sent
        sequence.num_sent = min(self._step - sequence.joined_at + 1, start.max_tokens)
        is_done = sequence.num_sent == start.max_tokens
        if is_done:
            del self._sequences[start.request_id]
        return worker_pb2.SequenceUpdate(
            request_id=start.request_id,
            attempt=start.attempt,
            first_index=first_index,
            token_ids=[token_of_step(sequence.joined_at + index) for index in range(first_index, sequence.num_sent)],
            finish_reason=types_pb2.FINISH_REASON_LENGTH if is_done else types_pb2.FINISH_REASON_UNSPECIFIED,
        )


class NullServicer(worker_pb2_grpc.WorkerServicer):
    """For one gateway."""

    def __init__(self, worker_id: str, engine: NullEngine) -> None:
        self._worker_id = worker_id
        self._engine = engine

    async def Serve(  # noqa: N802 - the method's name on the wire
        self, request_iterator: AsyncIterator[worker_pb2.ServeRequest], context: Any
    ) -> AsyncIterator[worker_pb2.ServeResponse]:
        del context
        await anext(request_iterator)
        receiving = asyncio.create_task(self._receive(request_iterator))
        try:
            yield worker_pb2.ServeResponse(welcome=worker_pb2.Welcome(worker_id=self._worker_id))
            while True:
                yield worker_pb2.ServeResponse(step_frame=await self._engine.next_frame())
        finally:
            receiving.cancel()

    async def _receive(self, requests: AsyncIterator[worker_pb2.ServeRequest]) -> None:
        async for request in requests:
            if request.HasField("start"):
                self._engine.start(request.start)
            elif request.HasField("cancel"):
                self._engine.cancel(request.cancel.request_id)


async def _serve(nats_url: str, instance: str, model: str, step_ms: float, files: CertificateFiles) -> None:
    worker_id = f"decode-0-{uuid.uuid4().hex[:8]}"
    server = make_server()
    worker_pb2_grpc.add_WorkerServicer_to_server(NullServicer(worker_id, NullEngine(step_ms / 1e3)), server)
    if files.cert:
        port = server.add_secure_port("127.0.0.1:0", server_credentials(CertificateWatch(files)))
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    record = WorkerRecord(
        worker_id=worker_id,
        role="decode",
        model=model,
        address=f"127.0.0.1:{port}",
        host_id="null",
        max_context_tokens=_MAX_CONTEXT_TOKENS,
        page_tokens=_PAGE_TOKENS,
        num_arena_pages=_NUM_PAGES,
        max_num_seqs=_MAX_NUM_SEQS,
        num_running=0,
        num_waiting=0,
        serves_locally=True,
    )
    bus = await NatsBus.connect(nats_url, name=worker_id, timeout_s=_REGISTER_TIMEOUT_S)
    entry = RegistryEntry(Subjects(instance), lambda: record)
    await entry.start(bus, _REGISTER_TIMEOUT_S)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await entry.stop()
    await server.stop(None)
    await bus.close()


def main(
    nats_url: Annotated[str, typer.Option()],
    instance: Annotated[str, typer.Option()],
    model: Annotated[str, typer.Option()],
    step_ms: Annotated[float, typer.Option(min=0)],
    tls_cert: Annotated[str, typer.Option()] = "",
    tls_key: Annotated[str, typer.Option()] = "",
    tls_ca: Annotated[str, typer.Option()] = "",
) -> None:
    """Until SIGTERM."""
    uvloop.run(_serve(nats_url, instance, model, step_ms, CertificateFiles(tls_cert, tls_key, tls_ca)))


if __name__ == "__main__":
    typer.run(main)
