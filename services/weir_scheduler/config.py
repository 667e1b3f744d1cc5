"""Settings of the scheduler."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from weir.core.fields import check_range
from weir.policy.registry import PolicySpec
from weir.runtime.config import ServiceConfig, setting
from weir.scheduling.limits import MAX_COUNT, CoreLimits, PlacingLimits, parse_lane, parse_lane_group


@dataclass(frozen=True)
class SchedulerConfig(ServiceConfig):
    """The scheduler: admits requests, orders them in lanes, places them, reserves pages and slots."""

    lanes: tuple[str, ...] = setting(
        ("interactive:4000:60", "standard:8000:120", "batch:16000:600"),
        "Lanes, most urgent first, each NAME:MAX_QUEUED:MAX_WAIT_S.",
    )
    lane_groups: tuple[str, ...] = setting(
        (), "Worker groups of lanes that name none in the limits, each LANE=GROUP. What a lane names goes over it."
    )
    default_lane: str = setting("standard", "Lane of requests that name none.")
    max_prefills_per_worker: int = setting(8, "Prompts given to a prefill worker before it has prefilled them.")
    max_prefill_tokens_per_worker: int = setting(
        2048, "Prompt tokens given to a prefill worker before it has prefilled them."
    )
    limits_file: str = setting(
        "", "TOML file of lanes and tenants; read again when it changes. What it says goes over `lanes`. Empty: none."
    )
    admin_key_file: str = setting(
        "",
        "File with a key that operators may use beside the limits' admin_key_digests; it is asked for once the limits "
        "hold keys. Empty: none.",
    )
    changes_file: str = setting(
        "", "File that gets a JSON line of each change of operators, beside the log. Put aside at 1 MiB. Empty: none."
    )
    policy: str = setting("fcfs", "Policy of the scheduler and of the workers: NAME or NAME:KEY=VALUE,…")
    page_overcommit: float = setting(
        1.0,
        "Pages that requests may reserve for each that there is. Above 1: some are preempted; raise max_stall_s too.",
    )
    memory_fit: Literal["conservative", "aggressive", "past-future", "predicted"] = setting(
        "conservative",
        "Whether one more request fits: by the worst case; by what runs now; by the lengths of past outputs; or by "
        "predicted lengths.",
    )
    link_mbit_s: float = setting(
        1000.0, "Of links between hosts that nobody has measured lately: whether a prefix is fetched depends on it."
    )
    nats_replicas: int = setting(
        1, "Servers of a NATS cluster that have each bucket that it makes: 1, 3 or 5. Life events are on one alone."
    )
    gather_s: float = setting(1.0, "Seconds after start in which gateways and workers report what there is.")

    limits: CoreLimits = field(init=False, repr=False)

    @property
    def changes_path(self) -> Path | None:
        return Path(self.changes_file) if self.changes_file else None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "gather_s", 0, 60)
        if self.nats_replicas not in (1, 3, 5):
            raise ValueError(f"nats_replicas {self.nats_replicas}: must be 1, 3 or 5, so that a majority is clear")
        try:
            PolicySpec.parse(self.policy)
        except ValueError as error:
            raise ValueError(f"policy {self.policy!r}: {error}") from error
        # Found now, not when the first request comes.
        object.__setattr__(self, "limits", self._make_limits())

    def _make_limits(self) -> CoreLimits:
        for name in ("max_prefills_per_worker", "max_prefill_tokens_per_worker"):
            check_range(self, name, 1, MAX_COUNT)
        if self.page_overcommit > 1 and self.memory_fit != "conservative":
            raise ValueError(
                f"page_overcommit {self.page_overcommit}: is for memory_fit conservative, not {self.memory_fit}"
            )
        return CoreLimits(
            lanes=tuple(parse_lane(text) for text in self.lanes),
            default_lane=self.default_lane,
            lane_groups=tuple(parse_lane_group(text) for text in self.lane_groups),
            max_prefills=self.max_prefills_per_worker,
            max_prefill_tokens=self.max_prefill_tokens_per_worker,
            page_overcommit=self.page_overcommit,
            placing=PlacingLimits(memory_fit=self.memory_fit, link_mbit_s=self.link_mbit_s),
            gather_s=self.gather_s,
        )
