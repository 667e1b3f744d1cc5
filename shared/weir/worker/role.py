"""What a prefill and a decode worker do differently, and what of their worker they do it with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from weir.engine.batching.batcher import Batcher, BatchLimits
from weir.engine.messages import Arrival, Command, EngineReport
from weir.engine.plan import ModelRunner
from weir.kv.arena.segment import Segment
from weir.kv.messages import HandedOff
from weir.telemetry.described import HistogramFigure
from weir.worker.arena.arena import Arena
from weir.worker.arena.page_keeper import PageKeeper
from weir.worker.arena.prefixes import Prefixes
from weir.worker.engine.model_loading import LoadedModel
from weir.worker.requests.drain import Untaken
from weir.worker.requests.request_manager import RequestManager
from weir.worker.requests.streams import GatewayStream


@dataclass(frozen=True)
class RoleParts:
    """The parts of a worker that its role uses. `post` is the engine's inbox; it raises InboxFull. `request_shutdown`
    ends the process in order, for a reason."""

    worker_id: str
    arena: Arena
    keeper: PageKeeper
    prefixes: Prefixes
    manager: RequestManager
    post: Callable[[Command], None]
    request_shutdown: Callable[[str], None]


class Role(Protocol):
    """Called in the event loop, but for `make_runner`."""

    @property
    def serves_locally(self) -> bool:
        """Whether the scheduler may place whole requests here, prompt and output."""
        ...

    def make_runner(self, model: LoadedModel, segment: Segment) -> ModelRunner:
        """What runs the engine's steps. Called in the thread that loaded the model."""
        ...

    def make_batcher(self, segment: Segment, limits: BatchLimits) -> Batcher: ...

    def on_start(self, stream: GatewayStream, prompt: Arrival, decode_worker_id: str) -> None:
        """A gateway wants a prompt started. Raises InvalidRequest if this worker is not the one to do it."""
        ...

    def on_handed_off(self, handed_off: HandedOff) -> None:
        """A sequence has come to this worker's lease."""
        ...

    def hand_over(self, untaken: Untaken) -> None:
        """Has others go on with what runs here, where the role knows how to. Called again and again while it drains."""
        ...

    def on_report(self, report: EngineReport) -> None:
        """Called after the request manager has seen the report's events."""
        ...

    async def stop(self) -> None:
        """Waits, within bounds, for what is under way."""
        ...

    def metrics(self) -> Mapping[str, float]: ...

    def histograms(self) -> Sequence[HistogramFigure]: ...
