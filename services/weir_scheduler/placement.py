"""Where a request runs: the prefill worker with the fewest prompt tokens before it, a decode worker of its host."""

from collections.abc import Sequence

from weir.bus.messages import Placement, WorkerRecord
from weir_scheduler.book import Book
from weir_scheduler.limits import CoreLimits
from weir_scheduler.request import Request
from weir_scheduler.workers import HostView


def try_place(
    request: Request, hosts: Sequence[HostView], book: Book, limits: CoreLimits, dispatch: int
) -> Placement | None:
    """None: nothing that the request needs is free now."""
    best: tuple[tuple[int, int, str], WorkerRecord, WorkerRecord] | None = None
    for host in hosts:
        decode = _try_pick_decode(request, host, book)
        if decode is None:
            continue
        for prefill in host.prefill:
            load = book.prefill_load(prefill.worker_id)
            if not _takes_prompt(request, prefill, book, limits):
                continue
            cost = (load.num_tokens, load.num_prompts, prefill.worker_id)
            if best is None or cost < best[0]:
                best = (cost, prefill, decode)
    if best is None:
        return None
    _, prefill, decode = best
    return Placement(
        dispatch=dispatch,
        prefill_worker_id=prefill.worker_id,
        prefill_address=prefill.address,
        decode_worker_id=decode.worker_id,
        decode_address=decode.address,
        num_booked_pages=request.num_pages,
    )


def _takes_prompt(request: Request, worker: WorkerRecord, book: Book, limits: CoreLimits) -> bool:
    load = book.prefill_load(worker.worker_id)
    if request.num_tokens > worker.max_context_tokens:
        return False
    num_tokens = load.num_tokens + request.submit.num_prompt_tokens
    return load.num_prompts == 0 or (load.num_prompts < limits.max_prefills and num_tokens <= limits.max_prefill_tokens)


def _try_pick_decode(request: Request, host: HostView, book: Book) -> WorkerRecord | None:
    num_booked = sum(book.decode_load(worker_id).num_pages for worker_id in host.all_decode_ids)
    if num_booked + request.num_pages > host.num_arena_pages:
        return None
    fitting = [
        worker
        for worker in host.decode
        if len(book.decode_load(worker.worker_id).request_ids) < worker.max_num_seqs
        and request.num_tokens <= worker.max_context_tokens
    ]
    return min(fitting, key=lambda worker: _decode_cost(worker, book), default=None)


def _decode_cost(worker: WorkerRecord, book: Book) -> tuple[int, int, str]:
    load = book.decode_load(worker.worker_id)
    return len(load.request_ids), load.num_pages, worker.worker_id
