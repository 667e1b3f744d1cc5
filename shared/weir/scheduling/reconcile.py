"""One request as its gateway reports it, against the request table."""

from enum import Enum

from weir.bus.messages import HeldRequest
from weir.scheduling.limits.core_limits import CoreLimits
from weir.scheduling.request import ScheduledRequest
from weir.scheduling.request_table import RequestTable


class Verdict(Enum):
    """What became of it."""

    KNOWN = "known"
    ADOPTED = "adopted"
    REFUSED = "refused"


def reconcile(entry: HeldRequest, gateway_id: str, requests: RequestTable, limits: CoreLimits, now_s: float) -> Verdict:
    """Takes the request over if the table lacks it. A newer dispatch wins, and of one dispatch what the gateway runs:
    it takes one grant of each, so that any other one of the same dispatch is void."""
    submit = entry.submit
    if submit.gateway_id != gateway_id:
        return Verdict.REFUSED
    request = requests.try_get(submit.request_id)
    if request is None:
        verdict = _take_over(entry, requests, limits, now_s)
    else:
        request.missing_since_s = None
        if _dispatch(entry) < request.dispatch:
            return Verdict.KNOWN
        verdict = _update(request, entry, requests, limits, now_s)
    request = requests.try_get(submit.request_id)
    if request is not None:
        requests.progressed(request, entry.num_output_tokens, now_s)
        if entry.is_prefilled:
            requests.reservations.mark_prefilled(request, now_s)
    return verdict


def _dispatch(entry: HeldRequest) -> int:
    return entry.submit.dispatch if entry.placement is None else entry.placement.dispatch


def _take_over(entry: HeldRequest, requests: RequestTable, limits: CoreLimits, now_s: float) -> Verdict:
    """However full the lane is: it was admitted before whatever fills it, by a scheduler that kept the bound."""
    submit = entry.submit
    if requests.tombstones.covers(entry):
        return Verdict.REFUSED
    if entry.placement is not None:
        requests.adopt(submit, entry.placement, entry.num_output_tokens, now_s)
        return Verdict.ADOPTED
    if requests.factory.lane_of(submit) not in limits.lanes_by_name:
        return Verdict.REFUSED
    requests.enqueue(submit, now_s, submit.num_prompt_tokens, is_ahead=True)
    return Verdict.ADOPTED


def _update(
    request: ScheduledRequest, entry: HeldRequest, requests: RequestTable, limits: CoreLimits, now_s: float
) -> Verdict:
    """Of a dispatch that is not older than the table's."""
    if entry.placement is not None:
        if entry.placement == request.placement:
            return Verdict.KNOWN
        requests.follow(request, entry.placement, now_s)
        return Verdict.ADOPTED
    if entry.submit.dispatch == request.dispatch:
        return Verdict.KNOWN
    if requests.factory.lane_of(entry.submit) not in limits.lanes_by_name:
        requests.remove(request, None, now_s)
        return Verdict.REFUSED
    requests.queue_again(request, entry.submit, now_s)
    return Verdict.ADOPTED
