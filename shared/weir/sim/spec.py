"""The shape of a simulated system: pools of workers, what joins them, and what fails when."""

from dataclasses import dataclass, field
from typing import Literal

from weir.engine.batching.own_rules import JoinSettings
from weir.engine.memory.preemption import PreemptionSettings
from weir.kv.geometry import PAGE_TOKENS
from weir.sim.profile import CostProfile

Role = Literal["local", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """`num_workers` equal workers, each with memory of its own.

    local    prefills and decodes itself (mixed steps); no other worker can be handed its sequences
    prefill  computes prompts and hands their sequences off
    decode   takes hand-offs; with `serves_locally` it prefills too, if the scheduler sends it whole prompts
    """

    role: Role
    num_workers: int
    profile: CostProfile
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    chunk_tokens: int = 2048
    """Of one sequence in one step."""
    num_pages: int = 0
    """Of each worker; 0: the profile's."""
    group: str = ""
    serves_locally: bool = False
    target_step_ms: float = 0.0
    """Steps get no more prompt tokens than last about so long; 0: all that fit."""
    host: str = ""
    """Whose memory its workers share with those of other pools of that name; empty: memory of their own."""

    def __post_init__(self) -> None:
        if self.role not in ("local", "prefill", "decode"):
            raise ValueError(f"role {self.role!r}: must be local, prefill or decode")
        for name in ("num_workers", "max_num_seqs", "max_num_batched_tokens", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1")
        if self.num_pages < 0:
            raise ValueError(f"num_pages {self.num_pages}: must be at least 0 (0: the profile's)")
        if not self.target_step_ms >= 0:
            raise ValueError(f"target_step_ms {self.target_step_ms}: must be at least 0 (0: no target)")

    @property
    def num_worker_pages(self) -> int:
        return self.num_pages or self.profile.num_pages

    @property
    def max_context_tokens(self) -> int:
        return min(self.profile.max_context_tokens, self.num_worker_pages * PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """What pages cross between workers of a split system."""

    gbytes_per_s: float
    latency_ms: float = 0.0
    is_shared: bool = False
    """All transfers one after the other; else only those that have a sender or a receiver in common."""

    def __post_init__(self) -> None:
        if not self.gbytes_per_s > 0:
            raise ValueError(f"gbytes_per_s {self.gbytes_per_s}: must be over 0")
        if not self.latency_ms >= 0:
            raise ValueError(f"latency_ms {self.latency_ms}: must be at least 0")


@dataclass(frozen=True, slots=True)
class FailureSpec:
    """A worker dies at `dies_at_s`, with all that is on it; a new one has its name from `returns_at_s` on."""

    worker_id: str
    dies_at_s: float
    returns_at_s: float = float("inf")

    def __post_init__(self) -> None:
        if not 0 <= self.dies_at_s < self.returns_at_s:
            raise ValueError(f"failure of {self.worker_id}: dies at {self.dies_at_s} s, returns at {self.returns_at_s}")


@dataclass(frozen=True, slots=True)
class SystemSpec:
    """Workers are named after their role and counted from 0 over all pools: local-0, prefill-0, decode-1 …

    Without a `link` the pages of a split system change their owner in place, as they do in one arena.
    """

    pools: tuple[PoolSpec, ...]
    link: LinkSpec | None = None
    join: JoinSettings = field(default_factory=JoinSettings)
    preemption: PreemptionSettings = field(default_factory=PreemptionSettings)
    failures: tuple[FailureSpec, ...] = ()
    keeps_prefixes: bool = True
    host_link: LinkSpec | None = None
    """Between each two hosts that pools name: prefixes cross, as the limits say. Its rate is what the scheduler takes
    the links to have as well."""

    def __post_init__(self) -> None:
        roles = {pool.role for pool in self.pools}
        if not self.pools:
            raise ValueError("pools: name at least one")
        if ("prefill" in roles) != ("decode" in roles) and not self._decodes_serve_locally:
            raise ValueError("pools: a prefill pool needs a decode pool, and the other way round")
        if (self.host_link is not None) != any(pool.host for pool in self.pools):
            raise ValueError("host_link: is for pools with hosts, and they need one")
        if self.host_link is not None and (self.link or not all(pool.host for pool in self.pools)):
            raise ValueError("host_link: give every pool a host, and no link, for pages of a host do not move")
        if self.preemption.num_swap_slots:
            raise ValueError(
                f"preemption.num_swap_slots {self.preemption.num_swap_slots}: must be 0, for copies to a swap file "
                "cost no time here; what is preempted is computed again"
            )
        known = self.worker_ids
        for failure in self.failures:
            if failure.worker_id not in known:
                raise ValueError(f"failures: {failure.worker_id!r} is none of {', '.join(known)}")

    @classmethod
    def colocated(
        cls,
        num_workers: int,
        profile: CostProfile,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        chunk_tokens: int = 2048,
        num_pages: int = 0,
    ) -> "SystemSpec":
        """Workers that each serve alone."""
        sizes = (max_num_seqs, max_num_batched_tokens, chunk_tokens, num_pages)
        return cls((PoolSpec("local", num_workers, profile, *sizes),))

    @classmethod
    def split(
        cls,
        num_prefill: int,
        num_decode: int,
        profile: CostProfile,
        *,
        link: LinkSpec | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        chunk_tokens: int = 2048,
        num_pages: int = 0,
    ) -> "SystemSpec":
        """Some workers prefill, others decode."""
        sizes = (max_num_seqs, max_num_batched_tokens, chunk_tokens, num_pages)
        prefill = PoolSpec("prefill", num_prefill, profile, *sizes)
        return cls((prefill, PoolSpec("decode", num_decode, profile, *sizes)), link)

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """By pool, in order."""
        ids, counts = [], {"local": 0, "prefill": 0, "decode": 0}
        for pool in self.pools:
            for _ in range(pool.num_workers):
                ids.append(f"{pool.role}-{counts[pool.role]}")
                counts[pool.role] += 1
        return tuple(ids)

    @property
    def shares_cores(self) -> bool:
        """Whether workers of the one host of a split system slow one another down."""
        return any(pool.role != "local" and pool.profile.contention > 0 for pool in self.pools)

    @property
    def _decodes_serve_locally(self) -> bool:
        pools = [pool for pool in self.pools if pool.role != "local"]
        return all(pool.role == "decode" and pool.serves_locally for pool in pools)
