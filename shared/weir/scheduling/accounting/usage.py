"""What each lane has in flight."""

from collections import Counter

from weir.scheduling.request import ScheduledRequest


class LaneUsage:
    """Granted requests and the pages that they count for, by lane; pages also by model."""

    def __init__(self) -> None:
        self._num_running: Counter[str] = Counter()
        self._num_pages: Counter[tuple[str, str]] = Counter()

    def num_running(self, lane: str) -> int:
        return self._num_running[lane]

    def num_pages(self, model: str, lane: str) -> int:
        return self._num_pages[model, lane]

    def add(self, request: ScheduledRequest) -> None:
        self._num_running[request.lane] += 1
        self._num_pages[request.submit.model, request.lane] += request.plan.num_charged_pages if request.plan else 0

    def remove(self, request: ScheduledRequest) -> None:
        """With the plan that it was added with."""
        self._num_running[request.lane] -= 1
        key = request.submit.model, request.lane
        self._num_pages[key] -= request.plan.num_charged_pages if request.plan else 0
        if not self._num_pages[key]:
            del self._num_pages[key]

    def counts(self) -> dict[str, int]:
        """lane -> requests in flight, of lanes that have any."""
        return dict(+self._num_running)
