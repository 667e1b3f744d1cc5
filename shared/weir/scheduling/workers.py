"""The workers that are alive, by their registry entries."""

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import NamedTuple

from weir.bus.messages import WorkerRecord

PREFILL = "prefill"
DECODE = "decode"
_MAX_FORGOTTEN = 1024


@dataclass(slots=True, eq=False)
class _Entry:
    record: WorkerRecord
    revision: int
    seen_at_s: float
    is_silent: bool = False


@dataclass(frozen=True, slots=True)
class HostView:
    """The workers of one model and group on one host that take new requests, and what its memories can hold."""

    host_id: str
    prefill: tuple[WorkerRecord, ...]
    decode: tuple[WorkerRecord, ...]
    """Those that no prompt can reach are left out: without prefill workers only those are here that serve locally, or
    whose prompts can be computed at other hosts. None at a host that computes prompts for others alone."""
    all_decode_ids: tuple[str, ...]
    """Draining and silent ones too, of any model: their reservations are in the arena as well."""
    all_prefill_ids: tuple[str, ...]
    num_arena_pages: int
    """Of its largest memory."""

    @property
    def max_context_tokens(self) -> int:
        """The longest sequence that one of its workers can serve, or two of them can together."""
        split = max((record.max_context_tokens for record in self.prefill), default=0)
        return max(
            record.max_context_tokens
            if record.serves_locally or not self.prefill
            else min(split, record.max_context_tokens)
            for record in self.decode
        )


class HostViews(NamedTuple):
    """Of one model and group."""

    serving: tuple[HostView, ...]
    """Those that have decode workers that requests can be placed on."""
    computing: tuple[HostView, ...]
    """Those without, whose prefill workers compute prompts for the others."""


class Workers:
    """Whoever is silent for `ttl_s` gets nothing new."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._entries: dict[str, _Entry] = {}
        self._forgotten: OrderedDict[str, _Entry] = OrderedDict()
        """Of workers that were removed last: whose memory what they had is in."""
        self._views: dict[tuple[str, str], HostViews] = {}
        self.prompts_cross = False
        """Whether one host may compute a prompt for another (`let_prompts_cross`)."""
        self.num_changes = 0
        """Rises whenever a worker comes, goes or changes its record; of its load alone it does not."""

    def __len__(self) -> int:
        return sum(not entry.is_silent for entry in self._entries.values())

    def __contains__(self, worker_id: object) -> bool:
        """Silent ones too."""
        return worker_id in self._entries

    def let_prompts_cross(self, may_cross: bool) -> None:
        """If they may not, a host that cannot prefill itself serves nothing."""
        if may_cross != self.prompts_cross:
            self.prompts_cross = may_cross
            self._changed()

    def put(self, record: WorkerRecord, revision: int, now_s: float) -> bool:
        """Takes a registry entry in. False: it came before, and is no sign of life."""
        entry = self._entries.get(record.worker_id)
        if entry is not None and entry.revision == revision:
            return False
        before = entry.record if entry is not None and not entry.is_silent else None
        self._entries[record.worker_id] = _Entry(record, revision, now_s)
        self._forgotten.pop(record.worker_id, None)
        if before is None or not _are_same_but_for_load(before, record):
            self._changed()
        return True

    def silence(self, worker_id: str) -> bool:
        """It gets nothing new, and is kept until `remove`, or until it speaks again. Whether it was in use."""
        entry = self._entries.get(worker_id)
        if entry is None or entry.is_silent:
            return False
        entry.is_silent = True
        self._changed()
        return True

    def records(self) -> tuple[WorkerRecord, ...]:
        return tuple(entry.record for entry in self._entries.values() if not entry.is_silent)

    def silent(self) -> list[str]:
        return [worker_id for worker_id, entry in self._entries.items() if entry.is_silent]

    def remove(self, worker_id: str) -> None:
        entry = self._entries.pop(worker_id, None)
        if entry is None:
            return
        self._forgotten[worker_id] = entry
        if len(self._forgotten) > _MAX_FORGOTTEN:
            self._forgotten.popitem(last=False)
        self._changed()

    def recall(self, worker_id: str) -> None:
        """Something is reserved on a worker that was removed: it is silent again, and its memory is shared with it."""
        entry = self._forgotten.pop(worker_id, None)
        if entry is not None:
            self._entries[worker_id] = entry
            self._changed()

    def expired(self, now_s: float) -> list[str]:
        """Those that have been silent for too long just now."""
        return [
            worker_id
            for worker_id, entry in self._entries.items()
            if not entry.is_silent and now_s - entry.seen_at_s > self._ttl_s
        ]

    def excuse_silence(self, now_s: float) -> None:
        """Nobody could be heard until now."""
        for entry in self._entries.values():
            entry.seen_at_s = now_s

    def find(self, worker_id: str) -> tuple[WorkerRecord, bool] | None:
        """What a worker said last, and whether it is heard. None: there is none of that id."""
        entry = self._entries.get(worker_id)
        return None if entry is None else (entry.record, not entry.is_silent)

    def all(self) -> list[tuple[WorkerRecord, bool]]:
        """As `find`, by id."""
        return [(entry.record, not entry.is_silent) for _, entry in sorted(self._entries.items())]

    def can_spare(self, worker_id: str) -> bool:
        """Whether requests of its model and group could be served without it, or cannot be with it either."""
        entry = self._entries.get(worker_id)
        if entry is None or entry.is_silent or entry.record.is_draining:
            return True
        model, group = entry.record.model, entry.record.group
        if not self.hosts_of(model, group):
            return True
        left = self._view(model, group, without=worker_id)
        return bool(left.serving or (group and self._view(model, "", without=worker_id).serving))

    def hosts_of(self, model: str, group: str = "") -> tuple[HostView, ...]:
        """Hosts whose workers of the group can serve a request. Where the model has none of the group that take
        requests, those of no group."""
        return self.views_of(model, group).serving

    def views_of(self, model: str, group: str = "") -> HostViews:
        """As `hosts_of`, with those that compute prompts for them."""
        key = (model, group)
        if key not in self._views:
            views = self._view(model, group)
            self._views[key] = views if views.serving or not group else self.views_of(model)
        return self._views[key]

    def pages_addresses(self, model: str) -> dict[str, str]:
        """Of arenas with workers of the model that are heard, where other hosts get their pages."""
        heard = (entry.record for entry in self._entries.values() if not entry.is_silent)
        return {one.host_id: one.pages_address for one in heard if one.model == model and one.pages_address}

    def can_serve(self, model: str) -> bool:
        """Whether any group's workers can serve a request of it now."""
        groups = {entry.record.group for entry in self._entries.values() if entry.record.model == model}
        return any(self.hosts_of(model, group) for group in groups)

    def _changed(self) -> None:
        self._views.clear()
        self.num_changes += 1

    def _view(self, model: str, group: str, without: str = "") -> HostViews:
        by_host: dict[str, list[_Entry]] = {}
        for worker_id, entry in sorted(self._entries.items()):
            if worker_id != without:
                by_host.setdefault(entry.record.host_id, []).append(entry)
        taking = {
            host_id: [
                entry.record
                for entry in entries
                if not (entry.is_silent or entry.record.is_draining)
                and (entry.record.model, entry.record.group) == (model, group)
            ]
            for host_id, entries in by_host.items()
        }
        sending = taking.items() if self.prompts_cross else ()
        senders = {i for i, records in sending if any(r.role == PREFILL and r.pages_address for r in records)}
        serving, computing = list[HostView](), list[HostView]()
        for host_id, records in sorted(taking.items()):
            view = _host_view(host_id, records, by_host[host_id], can_receive=bool(senders - {host_id}))
            if view.decode:
                serving.append(view)
            elif host_id in senders:
                computing.append(view)
        return HostViews(tuple(serving), tuple(computing))


def _host_view(host_id: str, taking: list[WorkerRecord], entries: list[_Entry], *, can_receive: bool) -> HostView:
    """`taking`: workers that take requests of the view's model and group; `entries`: all of the host. `can_receive`:
    other hosts compute prompts for those that exchange pages."""
    prefill = tuple(record for record in taking if record.role == PREFILL)
    decode = tuple(
        record
        for record in taking
        if record.role == DECODE and (prefill or record.serves_locally or (can_receive and record.pages_address))
    )
    # An arena that several workers report is as large as the most careful of them says.
    shared = [record.num_arena_pages for record in (*prefill, *decode) if not record.num_own_pages]
    own = max((record.num_own_pages for record in decode), default=0)
    ids = {
        role: tuple(entry.record.worker_id for entry in entries if entry.record.role == role)
        for role in (DECODE, PREFILL)
    }
    return HostView(host_id, prefill, decode, ids[DECODE], ids[PREFILL], max(own, min(shared, default=0)))


def _are_same_but_for_load(before: WorkerRecord, record: WorkerRecord) -> bool:
    if before is record:  # as in simulations most often
        return True
    now = replace(before, num_running=record.num_running, num_waiting=record.num_waiting, num_live=record.num_live)
    return now == record
