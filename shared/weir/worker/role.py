"""What a prefill and a decode worker do differently, as their common shell sees it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from weir.engine.batching.batcher import Batcher
from weir.engine.messages import EngineReport, SequenceKey
from weir.engine.plan import ModelRunner
from weir.kv.arena.segment import Segment
from weir.kv.messages import HandedOff
from weir.wire.v1 import worker_pb2
from weir.worker.requests.streams import GatewayStream


class Role(Protocol):
    """Called in the event loop."""

    def make_batcher(self, segment: Segment) -> Batcher: ...

    def on_start(self, stream: GatewayStream, key: SequenceKey, start: worker_pb2.Start) -> None:
        """A gateway wants a prompt started."""
        ...

    def on_handed_off(self, handed_off: HandedOff) -> None:
        """A sequence has come to this worker's lease."""
        ...

    def on_report(self, report: EngineReport) -> None:
        """After the desk has seen it."""
        ...

    async def stop(self) -> None:
        """Waits, within bounds, for what is under way."""
        ...

    def metrics(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner over the arena's pages, and what has to run once in the engine's thread before it is fast."""

    runner: ModelRunner
    warm_up: Callable[[], None]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What the registry says of a worker, but for its load and its arena."""

    worker_id: str
    role: str
    model: str
    address: str
    max_context_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int = 0
    group: str = ""
    policy: str = ""
    """NAME or NAME:KEY=VALUE,…; empty: none until the scheduler says one."""
    serves_locally: bool = False
