"""Where the workers of a simulated system are: hosts, memories, and who has one to itself."""

from dataclasses import dataclass

from weir.sim.memory.page_memory import PlainMemory, SimPageMemory
from weir.sim.memory.prefix_memory import PrefixMemory
from weir.sim.spec import PoolSpec, SystemSpec

_SPLIT_HOST = "host-split"


@dataclass(frozen=True, slots=True)
class Location:
    """What does not change when a worker dies and comes back."""

    worker_id: str
    pool: PoolSpec
    host_id: str
    memory: SimPageMemory
    owns_memory: bool
    """Nobody else takes pages of it, and it keeps no prefixes."""
    num_host_pages: int
    num_own_pages: int
    """0: the memory is the host's."""

    @property
    def arena_id(self) -> str:
        """As the scheduler knows it."""
        return self.worker_id if self.num_own_pages else self.host_id


def locations_of(spec: SystemSpec, *, keeps_prefixes: bool) -> dict[str, Location]:
    """Colocated workers are hosts by themselves; those of a split system are one, so that any may go with any."""
    ids = iter(spec.worker_ids)
    new_memory = PrefixMemory if keeps_prefixes else PlainMemory
    locations: dict[str, Location] = {}
    split = [pool for pool in spec.pools if pool.role != "local"]
    common: SimPageMemory | None = None
    if split and spec.link is None:
        common = new_memory(sum(p.num_workers * p.num_worker_pages for p in split), sum(map(_num_slots, split)))
    num_split_pages = sum(p.num_workers * p.num_worker_pages for p in split if p.role == "decode" or common is not None)
    for pool in spec.pools:
        for _ in range(pool.num_workers):
            worker_id = next(ids)
            is_local = pool.role == "local"
            memory = common
            if is_local or memory is None:
                memory = new_memory(pool.num_worker_pages, _num_slots(pool) // pool.num_workers)
            locations[worker_id] = Location(
                worker_id=worker_id,
                pool=pool,
                host_id=f"host-{worker_id}" if is_local else _SPLIT_HOST,
                memory=memory,
                # Hand-offs reserve pages of a decode worker behind its back.
                owns_memory=memory is not common and pool.role != "decode" and not keeps_prefixes,
                num_host_pages=pool.num_worker_pages if is_local else num_split_pages,
                num_own_pages=0 if is_local or memory is common else pool.num_worker_pages,
            )
    return locations


def _num_slots(pool: PoolSpec) -> int:
    """As an arena has them: enough for what runs, and what is on its way."""
    return 2 * pool.num_workers * pool.max_num_seqs
