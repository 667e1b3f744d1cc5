"""Prefixes that pass between simulated hosts, as transfer services pass them: reserved, brought, cached, or given up.

fetch    ──> reserved ──> what the source has crosses ───────────────────────> cached, the prompt starts
crossing ──> reserved ──> each chunk crosses as it is sealed ──> all is there ──> cached, the prompt starts
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weir.bus.messages import Placement
from weir.kv.geometry import PAGE_TOKENS
from weir.sim.hand_offs import TransferLink
from weir.sim.memory import PrefixMemory
from weir.sim.request_state import SimRequestState
from weir.sim.results.metrics import RequestOutcome
from weir.sim.spec import SystemSpec
from weir.sim.timeline import Timeline


@dataclass(slots=True)
class Incoming:
    """A part of a prefix on its way: `hashes`, behind `num_here` pages that are here."""

    source: str
    host_id: str
    memory: PrefixMemory
    all_hashes: tuple[bytes, ...]
    num_here: int
    page_ids: tuple[int, ...]
    on_over: Callable[[], None]
    num_sent: int = 0
    arrives_ns: int = 0
    is_over: bool = False

    @property
    def hashes(self) -> tuple[bytes, ...]:
        return self.all_hashes[self.num_here :]


def order_of(
    state: SimRequestState,
    placement: Placement,
    hashes: tuple[bytes, ...],
    on_computed: Callable[[int, bool], None],
) -> SimRequestState:
    """What the worker of another host computes of a request: its full pages, under an id of its own."""
    request = replace(
        state.request,
        request_id=f"{state.request.request_id}~",
        num_prompt_tokens=len(hashes) * PAGE_TOKENS,
        num_output_tokens=1,
        max_tokens=1,
        deadline_s=0.0,
    )
    outcome = RequestOutcome(request.request_id, request.arrival_s, request.lane, request.tenant, 0)
    worker_id = placement.prefix_worker_id
    at_sender = replace(placement, prefill_worker_id=worker_id, decode_worker_id=worker_id)
    return SimRequestState(request, outcome, hashes, None, at_sender, on_computed=on_computed)


class SimExchange:
    """Of all hosts. Each pair has a link of its own, one transfer after the other."""

    def __init__(self, spec: SystemSpec, timeline: Timeline) -> None:
        assert spec.host_link is not None, "hosts without links exchange nothing"
        self._timeline = timeline
        self._link_spec = spec.host_link
        self._token_bytes = spec.pools[0].profile.kv_bytes_per_token
        self._links: dict[tuple[str, str], TransferLink] = {}
        self._num_prefixes = 0
        self._num_failed = 0

    def counters(self) -> dict[str, float]:
        return {
            "exchanged_bytes": float(sum(link.num_bytes for link in self._links.values())),
            "exchanged_prefixes": float(self._num_prefixes),
            "exchanged_prefixes_failed": float(self._num_failed),
        }

    def try_reserve(
        self, source: str, host_id: str, memory: PrefixMemory, hashes: Sequence[bytes], on_over: Callable[[], None]
    ) -> Incoming | None:
        """Room for what is not here. None: there is none, or nothing is missing. `on_over`: called once, when all that
        comes is here."""
        num_here = memory.num_cached(hashes)
        page_ids = memory.try_reserve(len(hashes) - num_here)
        if page_ids is None:
            return None
        self._num_prefixes += 1
        return Incoming(source, host_id, memory, tuple(hashes), num_here, page_ids, on_over)

    def send(self, incoming: Incoming, num_pages: int, is_last: bool) -> None:
        """The source has the first `num_pages` of the prefix by now. `is_last`: no more will come, and what was sent is
        cached as soon as it is there."""
        num_new = min(num_pages, len(incoming.all_hashes)) - incoming.num_here - incoming.num_sent
        if incoming.is_over:
            return
        if num_new > 0:
            self._transfer(incoming, num_new)
        if is_last:
            incoming.is_over = True
            self._timeline.at(max(incoming.arrives_ns, self._timeline.now_ns), lambda: self._settle(incoming))

    def transfer(self, source: str, host_id: str, num_tokens: int) -> int:
        """When the last byte has arrived of what is sent now."""
        link = self._links.setdefault((source, host_id), TransferLink(self._link_spec, self._token_bytes))
        return link.transfer(self._timeline.now_ns, 0, 1, num_tokens)

    def _transfer(self, incoming: Incoming, num_new: int) -> None:
        incoming.num_sent += num_new
        incoming.arrives_ns = self.transfer(incoming.source, incoming.host_id, num_new * PAGE_TOKENS)

    def _settle(self, incoming: Incoming) -> None:
        self._num_failed += incoming.num_sent < len(incoming.hashes)
        incoming.memory.settle(incoming.page_ids, incoming.hashes[: incoming.num_sent], incoming.all_hashes)
        incoming.on_over()
