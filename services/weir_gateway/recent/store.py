"""The requests that run, and the last ones that ended, in a bounded room of memory. For operators alone."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from weir.core.clock import Clock
from weir.core.errors import NotFound
from weir.core.life import Phase
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

    def takes(self, summary: RequestSummary) -> bool:
        is_running = not Phase(summary.life).is_terminal
        return (
            self.tenant in ("", summary.tenant)
            and self.lane in ("", summary.lane)
            and self.model in ("", summary.model)
            and (self.life in ("", summary.life) or (self.life == "running" and is_running))
            and summary.duration_ms >= self.min_ms
        )


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
        named = (record for record in self._newest_first() if record.summary.client_id == request_id)
        found = next(named, None)
        if found is None:
            message = f"request {request_id[:100]!r} is not among the {self.num_held} that are remembered here"
            raise NotFound("request_id", message)
        return found

    def list_requests(self, wanted: RequestFilter) -> RequestList:
        summaries = (record.summary for record in self._newest_first())
        found = [summary for summary in summaries if wanted.takes(summary)]
        if wanted.order == "slowest":
            found.sort(key=lambda summary: -summary.duration_ms)
        return RequestList(self.gateway_id, self.num_held, tuple(found[: wanted.limit]))

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

    def _newest_first(self) -> Iterator[RequestRecord]:
        """Those that run come first, then by their ends."""
        yield from (timeline.record() for timeline in reversed(self._running.values()))
        yield from reversed(self._ended.values())

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
