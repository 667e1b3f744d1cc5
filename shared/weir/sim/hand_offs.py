"""Hand-offs of a simulated system: in place, or over a link into another memory, once that has room."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from weir.engine.messages import Failure, FailureReason, HandOffReady, PageBundle, UsedPages
from weir.kv.geometry import num_pages_for
from weir.sim.memory import SimPageMemory
from weir.sim.request_state import TOKEN, SimRequestState
from weir.sim.spec import LinkSpec, SystemSpec
from weir.sim.timeline import Timeline, ns_of_ms
from weir.sim.worker import SimArrival, SimWorker


class TransferLink:
    """Bytes take their time, and transfers wait for each other in the order in which they are asked for."""

    def __init__(self, spec: LinkSpec, kv_bytes_per_token: int) -> None:
        self._spec = spec
        self._kv_bytes_per_token = kv_bytes_per_token
        self._free_at_ns: dict[int, int] = {}
        self._shared_free_at_ns = 0
        self.num_bytes = 0
        self.busy_ns = 0

    def transfer(self, now_ns: int, sender: int, receiver: int, num_tokens: int) -> int:
        """When the last byte has arrived."""
        num_bytes = num_tokens * self._kv_bytes_per_token
        duration_ns = ns_of_ms(num_bytes / self._spec.gbytes_per_s / 1e6)
        if self._spec.is_shared:
            start_ns = max(now_ns, self._shared_free_at_ns)
            self._shared_free_at_ns = start_ns + duration_ns
        else:
            ends = (sender, receiver)
            start_ns = max(now_ns, *(self._free_at_ns.get(end, 0) for end in ends))
            self._free_at_ns.update(dict.fromkeys(ends, start_ns + duration_ns))
        self.num_bytes += num_bytes
        self.busy_ns += duration_ns
        return start_ns + duration_ns + ns_of_ms(self._spec.latency_ms)


@dataclass(frozen=True, slots=True)
class _Transfer:
    """From `ready`, whose sender keeps slot and pages until the receiver has the bytes."""

    sender: SimWorker
    receiver: SimWorker
    ready: HandOffReady
    state: SimRequestState


class SimHandOffs:
    """What is on its way between two workers, from the end of its prefill until the decode worker has it."""

    def __init__(self, spec: SystemSpec, timeline: Timeline, on_lost: Callable[[SimRequestState], None]) -> None:
        """`on_lost`: one of the two workers is dead, and the request is nowhere else."""
        self._on_lost = on_lost
        self._timeline = timeline
        profile = next((pool.profile for pool in spec.pools if pool.role == "decode"), None)
        self._link = (
            None if spec.link is None or profile is None else TransferLink(spec.link, profile.kv_bytes_per_token)
        )
        self._waiting: dict[int, deque[_Transfer]] = {}
        """By receiver: those for which its memory has no room yet, in order."""
        self._num_under_way = 0
        self._num_waited = 0

    def begin(
        self, sender: SimWorker, receiver: SimWorker, ready: HandOffReady, state: SimRequestState, delay_ns: int
    ) -> None:
        self._num_under_way += 1
        transfer = _Transfer(sender, receiver, ready, state)
        step: Callable[[_Transfer], None] = self._commit_in_place if self._link is None else self._reserve
        self._timeline.after(delay_ns, lambda: step(transfer))

    def refuse(self, sender: SimWorker, state: SimRequestState) -> None:
        """The receiver is gone."""
        failure = Failure(FailureReason.HAND_OFF_REFUSED, "the decode worker is gone")
        sender.post(lambda engine: engine.fail(state, failure))

    def retry(self, memory: SimPageMemory) -> None:
        """Pages have become free."""
        for waiting in self._waiting.values():
            while waiting and waiting[0].receiver.memory is memory and self._try_transfer(waiting[0]):
                waiting.popleft()

    def forget_worker(self, worker: SimWorker) -> None:
        """It is dead."""
        for transfer in self._waiting.pop(worker.index, ()):
            self._give_up(transfer)

    def counters(self) -> dict[str, float]:
        if self._link is None:
            return {}
        return {
            "link_bytes": float(self._link.num_bytes),
            "link_busy_s": self._link.busy_ns / 1e9,
            "hand_offs_that_waited_for_pages": float(self._num_waited),
        }

    def integrity_errors(self) -> list[str]:
        return [f"{self._num_under_way} hand-offs are under way at the end"] if self._num_under_way else []

    def _commit_in_place(self, transfer: _Transfer) -> None:
        sender, receiver, ready = transfer.sender, transfer.receiver, transfer.ready
        if not (sender.is_alive and receiver.is_alive):
            self._give_up(transfer)
            return
        self._num_under_way -= 1
        state = transfer.state
        sender.memory.hand_off(ready.slot, ready.page_ids, state.hashes, (sender.index, receiver.index))
        sender.post(lambda engine: engine.forget(state, None))
        self._deliver(transfer, ready.slot, ready.page_ids)

    def _reserve(self, transfer: _Transfer) -> None:
        waiting = self._waiting.setdefault(transfer.receiver.index, deque())
        if waiting or not self._try_transfer(transfer):
            self._num_waited += 1
            waiting.append(transfer)

    def _try_transfer(self, transfer: _Transfer) -> bool:
        """False: the receiver's memory has no room."""
        sender, receiver = transfer.sender, transfer.receiver
        if not (sender.is_alive and receiver.is_alive):
            self._give_up(transfer)
            return True
        num_tokens = transfer.state.request.num_prompt_tokens
        bundle = receiver.memory.try_acquire(receiver.index, num_pages_for(num_tokens), 1)
        if bundle is None:
            return False
        assert self._link is not None, "without a link pages change owner in place"
        ends_ns = self._link.transfer(self._timeline.now_ns, sender.index, receiver.index, num_tokens)
        slot, page_ids = bundle.slots[0], bundle.page_ids
        self._timeline.at(ends_ns, lambda: self._commit_copy(transfer, slot, page_ids))
        return True

    def _commit_copy(self, transfer: _Transfer, slot: int, page_ids: tuple[int, ...]) -> None:
        sender, receiver = transfer.sender, transfer.receiver
        if not (sender.is_alive and receiver.is_alive):
            if receiver.is_alive:
                receiver.memory.release(receiver.index, PageBundle(page_ids, (slot,)), ())
                self.retry(receiver.memory)
            self._give_up(transfer)
            return
        self._num_under_way -= 1
        state, num_tokens = transfer.state, transfer.state.request.num_prompt_tokens
        seed = state.request.request_id.encode() if state.hashes else b""
        used = UsedPages(transfer.ready.page_ids, (TOKEN,) * num_tokens if seed else (), seed)
        sender.post(lambda engine: engine.forget(state, PageBundle((), (transfer.ready.slot,), (used,))))
        self._deliver(transfer, slot, page_ids)

    def _deliver(self, transfer: _Transfer, slot: int, page_ids: tuple[int, ...]) -> None:
        receiver, state = transfer.receiver, transfer.state
        arrival = SimArrival(state, slot, page_ids)
        receiver.post(lambda engine: engine.add(arrival))
        if state.is_over:
            receiver.post(lambda engine: engine.cancel(state))

    def _give_up(self, transfer: _Transfer) -> None:
        self._num_under_way -= 1
        self._on_lost(transfer.state)
        if transfer.sender.is_alive:
            self.refuse(transfer.sender, transfer.state)
