"""One request as its gateway tells it, against the ledger."""

from enum import Enum

from weir.bus.messages import HeldRequest
from weir.scheduling.ledger import Ledger
from weir.scheduling.limits import CoreLimits


class Verdict(Enum):
    """What became of it."""

    KNOWN = "known"
    ADOPTED = "adopted"
    REFUSED = "refused"


def reconcile(entry: HeldRequest, gateway_id: str, ledger: Ledger, limits: CoreLimits, now_s: float) -> Verdict:
    """Takes the request over if the ledger lacks it; the newer dispatch wins if both have it."""
    submit, placement = entry.submit, entry.placement
    if submit.gateway_id != gateway_id:
        return Verdict.REFUSED
    request = ledger.try_get(submit.request_id)
    if request is None:
        verdict = _take_over(entry, ledger, limits, now_s)
    else:
        request.missing_since_s = None
        verdict = Verdict.KNOWN
        dispatch = request.placement.dispatch if request.placement else 0
        if placement is not None and placement.dispatch > dispatch:
            ledger.place(request, placement, now_s)
            verdict = Verdict.ADOPTED
    request = ledger.try_get(submit.request_id)
    if request is not None:
        ledger.progressed(request, entry.num_output_tokens, now_s)
        if entry.is_prefilled:
            ledger.book.mark_prefilled(request, now_s)
    return verdict


def _take_over(entry: HeldRequest, ledger: Ledger, limits: CoreLimits, now_s: float) -> Verdict:
    submit = entry.submit
    if submit.request_id in ledger.tombstones:
        return Verdict.REFUSED
    if entry.placement is not None:
        ledger.adopt(submit, entry.placement, entry.num_output_tokens, now_s)
        return Verdict.ADOPTED
    lane = submit.lane or limits.default_lane
    if lane not in limits.lanes_by_name or ledger.lanes.is_full(lane):
        return Verdict.REFUSED
    ledger.enqueue(submit, now_s, submit.num_prompt_tokens, is_ahead=True)
    return Verdict.ADOPTED
