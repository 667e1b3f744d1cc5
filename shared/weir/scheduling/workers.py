"""The workers that are alive, as their registry entries tell."""

from dataclasses import dataclass

from weir.bus.messages import WorkerRecord

PREFILL = "prefill"
DECODE = "decode"


@dataclass(slots=True)
class _Entry:
    record: WorkerRecord | None
    """None: an adopted grant names the worker; it has yet to show itself."""
    revision: int
    seen_at_s: float


@dataclass(frozen=True, slots=True)
class HostView:
    """The workers of one model on one host that take new requests, and what its arena can hold."""

    host_id: str
    prefill: tuple[WorkerRecord, ...]
    decode: tuple[WorkerRecord, ...]
    all_decode_ids: tuple[str, ...]
    """Draining ones too: their bookings are in the arena as well."""
    num_arena_pages: int

    @property
    def max_context_tokens(self) -> int:
        """The longest sequence for which there is a worker of each role."""
        return min(max(record.max_context_tokens for record in pool) for pool in (self.prefill, self.decode))

    def can_ever_hold(self, num_tokens: int, num_pages: int) -> bool:
        """Whether a request of this size fits when nothing else runs."""
        return num_pages <= self.num_arena_pages and num_tokens <= self.max_context_tokens


class Workers:
    """Whoever is silent for `ttl_s` is lost. `max_models` bounds the memory of models seen."""

    def __init__(self, ttl_s: float, max_models: int) -> None:
        self._ttl_s = ttl_s
        self._max_models = max_models
        self._entries: dict[str, _Entry] = {}
        self._seen_models: dict[str, None] = {}
        self._views: dict[str, tuple[HostView, ...]] = {}
        self._num_changes = 0

    def __len__(self) -> int:
        return sum(entry.record is not None for entry in self._entries.values())

    @property
    def num_changes(self) -> int:
        """Rises whenever a worker comes, goes or may have changed."""
        return self._num_changes

    def knows_model(self, model: str) -> bool:
        """Whether a worker of the model was ever seen."""
        return model in self._seen_models

    def put(self, record: WorkerRecord, revision: int, now_s: float) -> bool:
        """Takes a registry entry in. False: it is one that was told before, and no sign of life."""
        entry = self._entries.get(record.worker_id)
        if entry is not None and entry.record is not None and entry.revision == revision:
            return False
        self._entries[record.worker_id] = _Entry(record, revision, now_s)
        self._seen_models.pop(record.model, None)
        self._seen_models[record.model] = None
        if len(self._seen_models) > self._max_models:
            del self._seen_models[next(iter(self._seen_models))]
        self._changed()
        return True

    def expect(self, worker_id: str, now_s: float) -> None:
        """Gives a worker that is only known by name one `ttl_s` to show itself."""
        self._entries.setdefault(worker_id, _Entry(None, 0, now_s))

    def remove(self, worker_id: str) -> bool:
        """Whether it was there."""
        self._changed()
        return self._entries.pop(worker_id, None) is not None

    def expired(self, now_s: float) -> list[str]:
        return [worker_id for worker_id, entry in self._entries.items() if now_s - entry.seen_at_s > self._ttl_s]

    def excuse_silence(self, now_s: float) -> None:
        """Nobody could be heard until now."""
        for entry in self._entries.values():
            entry.seen_at_s = now_s

    def hosts_of(self, model: str) -> tuple[HostView, ...]:
        """Hosts that have a worker of each role."""
        if model not in self._views:
            self._views[model] = self._view(model)
        return self._views[model]

    def _changed(self) -> None:
        self._views.clear()
        self._num_changes += 1

    def _view(self, model: str) -> tuple[HostView, ...]:
        by_host: dict[str, list[WorkerRecord]] = {}
        for entry in self._entries.values():
            if entry.record is not None and entry.record.model == model:
                by_host.setdefault(entry.record.host_id, []).append(entry.record)
        views = []
        for host_id, records in sorted(by_host.items()):
            taking = [record for record in records if not record.is_draining]
            prefill = tuple(record for record in taking if record.role == PREFILL)
            decode = tuple(record for record in taking if record.role == DECODE)
            decode_ids = tuple(record.worker_id for record in records if record.role == DECODE)
            if prefill and decode:
                num_pages = min(record.num_arena_pages for record in records)
                views.append(HostView(host_id, prefill, decode, decode_ids, num_pages))
        return tuple(views)
