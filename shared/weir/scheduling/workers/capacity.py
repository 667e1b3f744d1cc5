"""What the workers of a model could hold if nothing else ran; looked up anew only when a worker changes."""

from dataclasses import dataclass

from weir.scheduling.workers.workers import HostView, Workers


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """Of the workers of one model that a lane's requests go to."""

    hosts: tuple[tuple[int, int], ...]
    """(pages, tokens of context) of each host."""
    num_pages: int
    """Of all memories that they book in."""
    has_own_group: bool
    """They are workers that other lanes do not get."""

    def can_ever_hold(self, num_tokens: int, num_pages: int) -> bool:
        return any(num_pages <= pages and num_tokens <= tokens for pages, tokens in self.hosts)


class Capacity:
    """By model and worker group. A model has the groups of the lanes at most."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._pools: dict[tuple[str, str], PoolCapacity] = {}
        self._num_changes = -1

    def of(self, model: str, group: str) -> PoolCapacity:
        if self._num_changes != self._workers.num_changes:
            self._num_changes = self._workers.num_changes
            self._pools.clear()
        pool = self._pools.get((model, group))
        if pool is None:
            hosts = self._workers.hosts_of(model, group)
            has_own_group = bool(group) and hosts is not self._workers.hosts_of(model)
            pool = PoolCapacity(tuple(_sizes(host) for host in hosts), _all_pages(hosts), has_own_group)
            if self._workers.knows_model(model):
                self._pools[model, group] = pool
        return pool


def _sizes(host: HostView) -> tuple[int, int]:
    return host.num_arena_pages, host.max_context_tokens


def _all_pages(hosts: tuple[HostView, ...]) -> int:
    own = {record.worker_id: record.num_own_pages for host in hosts for record in host.decode}
    return sum(own.values()) or sum(host.num_arena_pages for host in hosts)
