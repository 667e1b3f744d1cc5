"""One simulated request on its way: its gateway's view, and the truth that only the modelled workers may read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from weir.bus.messages import Placement
from weir.core.life import Attempt
from weir.core.sampling import SamplingParams, StopRules
from weir.engine.messages import SequenceKey
from weir.kv.geometry import PAGE_TOKENS
from weir.kv.records.record import SequenceParams
from weir.sim.results.metrics import RequestOutcome
from weir.sim.workloads.workload import SimRequest

GATEWAY_ID = "gateway-0-00000000"
TOKEN = 0
LAST_TOKEN = 1
"""What the modelled model samples: the second where a request's answer ends."""
VOCAB_SIZE = 2
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True, eq=False)
class SimRequestState:
    """Changed by the simulated gateway, and by the worker that reports tokens to it."""

    request: SimRequest
    outcome: RequestOutcome
    hashes: tuple[bytes, ...]
    expires_ns: int | None
    placement: Placement | None = None
    is_over: bool = False
    """As its gateway sees it."""
    last_token_ns: int = 0
    settle: "Callable[[SimRequestState], None] | None" = None
    """Reports what a fast engine has not reported yet; nothing that comes later counts."""
    num_reported_tokens: int = 0
    num_sealed_pages: int = 0
    """Of its prompt, at the worker that prefills it: others can use them already."""
    order: "SimRequestState | None" = None
    """Its full pages, as a worker of another host computes them."""
    on_computed: Callable[[int, bool], None] | None = None
    """Of an order: told how many first pages are computed, and whether no more will be."""
    num_true_tokens: int = field(init=False)
    """Of its answer."""

    def __post_init__(self) -> None:
        self.num_true_tokens = min(self.request.num_output_tokens, self.request.max_tokens)

    @property
    def key(self) -> SequenceKey:
        assert self.placement is not None, "only a granted request has an attempt"
        return SequenceKey(self.request.request_id, Attempt(self.placement.dispatch))

    def params(self) -> SequenceParams:
        """As its Start has them. `prefix_seed` names the request, so that its pages are known when they come back."""
        placement = self.placement
        assert placement is not None, "only a granted request is started"
        request = self.request
        return SequenceParams(
            request_id=request.request_id,
            attempt=Attempt(placement.dispatch),
            gateway_id=GATEWAY_ID,
            prompt_token_ids=(TOKEN,) * request.num_prompt_tokens,
            sampling=_GREEDY,
            stop=StopRules(request.max_tokens, (LAST_TOKEN,)),
            num_reserved_pages=placement.num_reserved_pages,
            traceparent="",
            scheduling=placement.scheduling,
            prefix_seed=request.request_id.encode() if self.hashes else b"",
        )


class PromptHashes:
    """Page hashes of prompts that are known by their blocks only: equal leading blocks, equal hashes."""

    def __init__(self, block_tokens: int, *, is_whole: bool = False) -> None:
        """`is_whole`: what is behind a prompt's blocks has hashes too, those of no other prompt."""
        self._is_whole = is_whole
        self._pages_per_block = block_tokens // PAGE_TOKENS
        self._chains: dict[tuple[int, int], int] = {}

    def hashes_of(self, request: SimRequest) -> tuple[bytes, ...]:
        """One for each full page; as on the wire, 8 bytes of each tell all of them apart."""
        num_pages = request.num_prompt_tokens // PAGE_TOKENS
        hashes: list[bytes] = []
        chain = 0
        for block in request.prefix_blocks:
            chain = self._chains.setdefault((chain, block), len(self._chains) + 1)
            for page in range(min(self._pages_per_block, num_pages - len(hashes))):
                hashes.append((chain << 16 | page).to_bytes(8, "little") + bytes(8))
        if self._is_whole:
            chain = self._chains.setdefault((chain, -len(self._chains) - 1), len(self._chains) + 1)
            rest = range(num_pages - len(hashes))
            hashes += [(chain << 16 | page).to_bytes(8, "little") + bytes(8) for page in rest]
        return tuple(hashes)


RequestStates = Mapping[str, SimRequestState]
