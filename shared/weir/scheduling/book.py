"""What granted requests have booked on each worker."""

from dataclasses import dataclass, field

from weir.scheduling.request import Request


@dataclass(slots=True)
class DecodeLoad:
    """Booked on one decode worker: a slot each, and pages of its host's arena."""

    request_ids: set[str] = field(default_factory=set)
    num_pages: int = 0


@dataclass(slots=True)
class PrefillLoad:
    """Prompts on one prefill worker that it has not read yet, oldest grant first."""

    granted_at_s: dict[str, float] = field(default_factory=dict)
    num_tokens: int = 0

    @property
    def num_prompts(self) -> int:
        return len(self.granted_at_s)


_NO_DECODES = DecodeLoad()
_NO_PREFILLS = PrefillLoad()


class Book:
    """Bookings of granted requests; freeing twice does no harm."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._decode: dict[str, DecodeLoad] = {}
        self._prefill: dict[str, PrefillLoad] = {}
        self._num_frees = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_frees(self) -> int:
        """Rises whenever something becomes free."""
        return self._num_frees

    @property
    def num_pages(self) -> int:
        return sum(load.num_pages for load in self._decode.values())

    @property
    def num_prefills(self) -> int:
        return sum(load.num_prompts for load in self._prefill.values())

    def decode_load(self, worker_id: str) -> DecodeLoad:
        """To be read only."""
        return self._decode.get(worker_id, _NO_DECODES)

    def prefill_load(self, worker_id: str) -> PrefillLoad:
        """To be read only."""
        return self._prefill.get(worker_id, _NO_PREFILLS)

    def add(self, request: Request, now_s: float) -> None:
        """`request.placement` says where; its prompt counts as unread."""
        placement = request.placement
        if placement is None or request.request_id in self._requests:
            raise ValueError(f"request {request.request_id}: not placed, or booked already")
        self._requests[request.request_id] = request
        decode = self._decode.setdefault(placement.decode_worker_id, DecodeLoad())
        decode.request_ids.add(request.request_id)
        decode.num_pages += placement.num_booked_pages
        prefill = self._prefill.setdefault(placement.prefill_worker_id, PrefillLoad())
        prefill.granted_at_s[request.request_id] = now_s
        prefill.num_tokens += request.submit.num_prompt_tokens

    def mark_prefilled(self, request: Request) -> None:
        placement = request.placement
        load = self._prefill.get(placement.prefill_worker_id) if placement else None
        if load is None or load.granted_at_s.pop(request.request_id, None) is None:
            return
        self._num_frees += 1
        load.num_tokens -= request.submit.num_prompt_tokens
        if placement is not None and not load.granted_at_s:
            del self._prefill[placement.prefill_worker_id]

    def settle_prefills(self, worker_id: str, num_on_worker: int, granted_before_s: float) -> None:
        """The worker itself says how many it has: of the grants that must have reached it, the oldest are done."""
        granted_at_s = self.prefill_load(worker_id).granted_at_s
        reached = [request_id for request_id, at_s in granted_at_s.items() if at_s < granted_before_s]
        for request_id in reached[: max(0, len(reached) - num_on_worker)]:
            self.mark_prefilled(self._requests[request_id])

    def remove(self, request: Request) -> None:
        self.mark_prefilled(request)
        placement = request.placement
        if placement is None or self._requests.pop(request.request_id, None) is None:
            return
        self._num_frees += 1
        load = self._decode[placement.decode_worker_id]
        load.request_ids.discard(request.request_id)
        load.num_pages -= placement.num_booked_pages
        if not load.request_ids:
            del self._decode[placement.decode_worker_id]

    def requests_on(self, worker_id: str) -> list[Request]:
        """Those that end with the worker: all on a decode worker, those not read yet on a prefill worker."""
        ids = sorted(self.decode_load(worker_id).request_ids | self.prefill_load(worker_id).granted_at_s.keys())
        return [self._requests[request_id] for request_id in ids]

    def check_integrity(self) -> list[str]:
        """What does not add up."""
        errors = []
        placements = {request_id: request.placement for request_id, request in self._requests.items()}
        for worker_id, load in self._decode.items():
            mine = {i: p for i, p in placements.items() if p is not None and p.decode_worker_id == worker_id}
            if mine.keys() != load.request_ids or sum(p.num_booked_pages for p in mine.values()) != load.num_pages:
                errors.append(f"decode worker {worker_id}: {load.num_pages} pages booked by {len(load.request_ids)}")
        if sum(len(load.request_ids) for load in self._decode.values()) != len(self._requests):
            errors.append(f"{len(self._requests)} requests are granted, not as many decode slots are booked")
        for worker_id, prefill in self._prefill.items():
            tokens = [self._requests[i].submit.num_prompt_tokens for i in prefill.granted_at_s if i in self._requests]
            if len(tokens) != prefill.num_prompts or sum(tokens) != prefill.num_tokens:
                errors.append(f"prefill worker {worker_id}: {prefill.num_tokens} tokens of {prefill.num_prompts}")
        return errors
