"""Where a request runs: the prefill worker with the fewest prompt tokens before it, a decode worker of its host."""

from collections.abc import Sequence

from weir.bus.messages import Placement, WorkerRecord
from weir.scheduling.book import Book
from weir.scheduling.limits import CoreLimits
from weir.scheduling.request import Request
from weir.scheduling.workers import HostView

_Cost = tuple[int, int, str]
"""Less is better; the worker's id makes it total, so that the same state always gives the same place."""


def try_place(
    request: Request, hosts: Sequence[HostView], book: Book, limits: CoreLimits, dispatch: int
) -> Placement | None:
    """None: nothing that the request needs is free now."""
    best: tuple[_Cost, WorkerRecord, WorkerRecord] | None = None
    for host in hosts:
        prefill = _try_pick_prefill(request, host, book, limits)
        if prefill is None or (best is not None and best[0] < prefill[0]):
            continue
        decode = _try_pick_decode(request, host, book, limits)
        if decode is not None:
            best = (*prefill, decode)
    if best is None:
        return None
    _, prefill_worker, decode_worker = best
    return Placement(
        dispatch=dispatch,
        prefill_worker_id=prefill_worker.worker_id,
        prefill_address=prefill_worker.address,
        decode_worker_id=decode_worker.worker_id,
        decode_address=decode_worker.address,
        num_booked_pages=request.num_pages,
        lane_priority=limits.lane_priority(request.lane),
    )


def _try_pick_prefill(
    request: Request, host: HostView, book: Book, limits: CoreLimits
) -> tuple[_Cost, WorkerRecord] | None:
    best: tuple[_Cost, WorkerRecord] | None = None
    for worker in host.prefill:
        load = book.prefill_load(worker.worker_id)
        num_tokens = load.num_tokens + request.submit.num_prompt_tokens
        is_full = load.num_prompts >= limits.max_prefills or num_tokens > limits.max_prefill_tokens
        if (is_full and load.num_prompts > 0) or request.num_tokens > worker.max_context_tokens:
            continue
        cost = (load.num_tokens, load.num_prompts, worker.worker_id)
        if best is None or cost < best[0]:
            best = (cost, worker)
    return best


def _try_pick_decode(request: Request, host: HostView, book: Book, limits: CoreLimits) -> WorkerRecord | None:
    best: tuple[_Cost, WorkerRecord] | None = None
    for worker in host.decode:
        load = book.decode_load(worker.worker_id)
        num_seqs = len(load.request_ids)
        if num_seqs >= worker.max_num_seqs or request.num_tokens > worker.max_context_tokens:
            continue
        cost = (num_seqs, load.num_pages, worker.worker_id)
        if best is None or cost < best[0]:
            best = (cost, worker)
    if best is None:
        return None
    num_booked_pages = sum(book.decode_load(worker_id).num_pages for worker_id in host.all_decode_ids)
    num_bookable_pages = host.num_arena_pages * limits.page_overcommit
    return best[1] if num_booked_pages + request.num_pages <= num_bookable_pages else None
