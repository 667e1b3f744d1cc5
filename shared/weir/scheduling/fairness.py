"""Virtual token counters: how much service each tenant of a lane has had.

After Sheng et al., "Fairness in Serving Large Language Models" (VTC, OSDI 2024, arXiv 2401.00588): of those that wait,
the one with the least counter is served next; one that begins to wait is lifted to the least of those that wait,
so that nobody saves up service while away. For two tenants that wait all the time the service that they get differs by
at most 2 * max(PREFILL_PRICE * longest prompt, DECODE_PRICE * tokens that fit in the fleet).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from math import inf

PREFILL_PRICE = 1.0
"""Of a prompt token that is computed; one that is in a cache costs nothing."""
DECODE_PRICE = 2.0
"""Of an output token."""
_MAX_GROUPS = 4096

GroupKey = tuple[str, str]
"""(model, lane): tenants compete for the same workers."""


class VirtualCounters:
    """One group's counters. They only rise."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._last = ""
        """Who was the last to stop waiting."""
        self._last_value = 0.0
        """Its counter then: it may be forgotten since."""

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> float:
        return self._values.get(name, 0.0)

    @property
    def values(self) -> Mapping[str, float]:
        return self._values

    def lift(self, name: str, least_waiting: float | None) -> None:
        """`name` begins to wait; `least_waiting`: the least counter of the others that wait, None: nobody does."""
        # What the last one still runs is charged to it after it has stopped waiting, and counts as well.
        floor = max(self._last_value, self[self._last]) if least_waiting is None else least_waiting
        self._values[name] = max(self[name], floor)

    def leave(self, name: str) -> None:
        """`name` does not wait any more."""
        self._last, self._last_value = name, self[name]

    def charge(self, name: str, service: float) -> None:
        """`service`: tokens by their price, over the weight of `name`."""
        self._values[name] = self._values.get(name, 0.0) + service

    def restore(self, values: Mapping[str, float]) -> None:
        """What an earlier scheduler had counted. What is no amount of service is left out."""
        for name, value in values.items():
            if 0 <= value < inf:
                self._values[name] = max(self[name], value)

    def keep_only(self, names: Collection[str]) -> None:
        for name in [name for name in self._values if name not in names]:
            del self._values[name]


class Fairness:
    """The counters of all groups. Over `max_groups` the one that was made first goes, of those that nobody needs. Those
    that are needed stay, for queues hold them: where they are more, there are twice as many as needed at the most."""

    def __init__(self, is_needed: Callable[[GroupKey], bool], max_groups: int = _MAX_GROUPS) -> None:
        """`is_needed`: whether requests of the model wait, or some of the group run."""
        self._is_needed = is_needed
        self._max_groups = max_groups
        self._look_at_groups = max_groups
        """With so many it is looked for some that nobody needs."""
        self._groups: dict[GroupKey, VirtualCounters] = {}

    def __len__(self) -> int:
        return sum(len(counters.values) for counters in self._groups.values())

    def group(self, model: str, lane: str) -> VirtualCounters:
        """Made when it is first asked for."""
        counters = self._groups.get((model, lane))
        return counters if counters is not None else self._add((model, lane))

    def items(self) -> Iterator[tuple[GroupKey, VirtualCounters]]:
        yield from self._groups.items()

    def values(self) -> dict[GroupKey, dict[str, float]]:
        """Of groups that have any."""
        return {key: dict(counters.values) for key, counters in self._groups.items() if counters.values}

    def restore(
        self, values: Mapping[GroupKey, Mapping[str, float]], lanes: Collection[str], tenants: Collection[str]
    ) -> None:
        """What an earlier scheduler had counted, of these lanes and tenants."""
        for (model, lane), counters in sorted(values.items()):
            if lane in lanes and len(self._groups) < self._max_groups:
                known = {name: value for name, value in counters.items() if name in tenants}
                self.group(model, lane).restore(known)

    def keep_only(self, lanes: Collection[str], tenants: Collection[str]) -> None:
        """Forgets lanes and tenants that are configured no more."""
        self._groups = {key: counters for key, counters in self._groups.items() if key[1] in lanes}
        for counters in self._groups.values():
            counters.keep_only(tenants)

    def _add(self, key: GroupKey) -> VirtualCounters:
        self._make_room(key[0])
        self._groups[key] = VirtualCounters()
        return self._groups[key]

    def _make_room(self, model: str) -> None:
        """For a group of the model, of which the others are needed as well. Who is needed goes to the end, so that the
        next look need not pass it again."""
        if len(self._groups) < self._look_at_groups:
            return
        for key in list(self._groups):
            counters = self._groups.pop(key)
            if key[0] == model or self._is_needed(key):
                self._groups[key] = counters
            if len(self._groups) < self._max_groups:
                break
        num_groups = len(self._groups)
        self._look_at_groups = self._max_groups if num_groups < self._max_groups else 2 * num_groups
