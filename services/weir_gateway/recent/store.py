"""The requests that run, and the last ones that ended, in a bounded room of memory. For operators alone."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from weir.core.clock import Clock
from weir.core.errors import NotFound
from weir.telemetry.request_record import RequestList, RequestRecord, RequestSummary
from weir_gateway.recent.timeline import RequestAbout, RequestTimeline
from weir_gateway.requests.request_times import RequestTimes

_RECORD_BYTES = 2048
_PART_BYTES = 512
"""Roughly what a record takes, and each of its phases and events."""


@dataclass(frozen=True, slots=True)
class RecentSettings:
    """Of requests that have ended; those that run are as many as their gateway takes."""

    max_requests: int = 1000
    max_bytes: int = 8 << 20


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Empty, or 0: any. `life`: a terminal phase of life, or `running` for all that have not ended."""

    tenant: str = ""
    lane: str = ""
    model: str = ""
    life: str = ""
    min_ms: float = 0.0
    order: Literal["newest", "slowest"] = "newest"
    limit: int = 50

    def takes(self, about: RequestAbout | RequestSummary, life: str, duration_ms: float) -> bool:
        return (
            self.tenant in ("", about.tenant)
            and self.lane in ("", about.lane)
            and self.model in ("", about.model)
            and self.life in ("", life)
            and duration_ms >= self.min_ms
        )


_Held = RequestTimeline | RequestRecord


class RecentRequests:
    """Timelines of requests that run are in it from when they are accepted."""

    def __init__(self, gateway_id: str, settings: RecentSettings, clock: Clock) -> None:
        self.gateway_id = gateway_id
        self._settings = settings
        self._clock = clock
        self._running: OrderedDict[str, RequestTimeline] = OrderedDict()
        self._ended: OrderedDict[str, RequestRecord] = OrderedDict()
        """In the order of their ends; the oldest goes first."""
        self._num_bytes = 0

    def open(self, about: RequestAbout, times: RequestTimes) -> RequestTimeline:
        timeline = RequestTimeline(about, times, self._clock, self._keep)
        self._running[about.request_id] = timeline
        return timeline

    def find(self, request_id: str) -> RequestRecord:
        """By its id, or by what its client called it: then the newest. Raises NotFound."""
        running = self._running.get(request_id)
        if running is not None:
            return running.record()
        ended = self._ended.get(request_id)
        if ended is not None:
            return ended
        held: tuple[_Held, ...] = (*reversed(self._running.values()), *reversed(self._ended.values()))
        found = next((one for one in held if _client_id_of(one) == request_id), None)
        if found is None:
            message = f"request {request_id[:100]!r} is not among the {self.num_held} that are remembered here"
            raise NotFound("request_id", message)
        return found.record() if isinstance(found, RequestTimeline) else found

    def list_requests(self, wanted: RequestFilter) -> RequestList:
        found = self._matching(wanted)
        if wanted.order == "slowest":
            found = iter(sorted(found, key=_duration_ms, reverse=True))
        # Records of those that run are made for those alone that are shown: the event loop has other things to do.
        shown = (one.record() if isinstance(one, RequestTimeline) else one for one in islice(found, wanted.limit))
        return RequestList(self.gateway_id, self.num_held, tuple(record.summary for record in shown))

    @property
    def num_held(self) -> int:
        return len(self._running) + len(self._ended)

    def metrics(self) -> dict[str, float]:
        return {"recent_requests": float(len(self._ended)), "recent_request_bytes": float(self._num_bytes)}

    def check_integrity(self) -> list[str]:
        num_bytes = sum(map(_bytes_of, self._ended.values()))
        return (
            [] if num_bytes == self._num_bytes else [f"recent requests: {num_bytes} bytes, {self._num_bytes} counted"]
        )

    def _matching(self, wanted: RequestFilter) -> Iterator[_Held]:
        """The newest first: those that run, then by their ends."""
        for timeline in reversed(self._running.values()):
            if wanted.takes(timeline.about, "running", timeline.age_ms):
                yield timeline
        for record in reversed(self._ended.values()):
            if wanted.takes(record.summary, record.summary.life, record.summary.duration_ms):
                yield record

    def _keep(self, timeline: RequestTimeline) -> None:
        request_id = timeline.about.request_id
        self._running.pop(request_id, None)
        self._drop(request_id)  # a request with a key may have come again under its id
        record = timeline.record()
        self._ended[request_id] = record
        self._num_bytes += _bytes_of(record)
        while len(self._ended) > self._settings.max_requests or self._num_bytes > self._settings.max_bytes:
            self._drop(next(iter(self._ended)))

    def _drop(self, request_id: str) -> None:
        record = self._ended.pop(request_id, None)
        if record is not None:
            self._num_bytes -= _bytes_of(record)


def _bytes_of(record: RequestRecord) -> int:
    return _RECORD_BYTES + _PART_BYTES * (len(record.phases) + len(record.events))


def _client_id_of(held: _Held) -> str:
    return held.about.client_id if isinstance(held, RequestTimeline) else held.summary.client_id


def _duration_ms(held: _Held) -> float:
    return held.age_ms if isinstance(held, RequestTimeline) else held.summary.duration_ms
