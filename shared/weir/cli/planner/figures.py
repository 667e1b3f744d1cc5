"""What pages of metrics say of the time between two looks: sums over processes, as the planner wants them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from weir.core.cost import StepCost
from weir.core.roles import WorkerRole
from weir.planner.observation import MAX_LENGTHS, Observation, PoolCount

Labels = frozenset[tuple[str, str]]
_STEP_COST = "weir_worker_step_cost"
_IS_DRAINED = "weir_worker_is_drained"
_TTFT, _TPOT = "weir_time_to_first_token_seconds", "weir_time_per_output_token_seconds"
PROMPTS, _OUTPUTS = "weir_request_prompt_tokens", "weir_request_output_tokens"


class FiguresMissing(Exception):
    """Something that the planner needs is not on the pages; the message names it."""


@dataclass(frozen=True, slots=True)
class Figures:
    """All series of one look, each once, however many pages show it."""

    at_s: float
    series: Mapping[str, Mapping[Labels, float]]

    @classmethod
    def parse(cls, at_s: float, pages: Iterable[str]) -> "Figures":
        """What is not finite is not there. Raises ValueError for what is no page of metrics."""
        series: dict[str, dict[Labels, float]] = {}
        for page in pages:
            for family in text_string_to_metric_families(page):
                for sample in filter(_is_finite, family.samples):
                    series.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
        return cls(at_s, series)

    def gauge(self, name: str, role: str = "") -> float:
        """Summed over processes, of one role or all. Raises FiguresMissing."""
        found = [value for labels, value in self.series.get(name, {}).items() if not role or ("role", role) in labels]
        if not found:
            raise FiguresMissing(f"{name}{f' of {role} workers' if role else ''}")
        return sum(found)

    def of_those_that_serve(self) -> "Figures":
        """Without the processes that are drained: what they could take is nobody's, though their pages show it."""
        drained = {dict(labels).get("process") for labels, value in self.series.get(_IS_DRAINED, {}).items() if value}
        kept = {
            name: {labels: value for labels, value in series.items() if dict(labels).get("process") not in drained}
            for name, series in self.series.items()
        }
        return replace(self, series=kept) if drained else self

    def try_gauge(self, name: str, role: str = "") -> float | None:
        try:
            return self.gauge(name, role)
        except FiguresMissing:
            return None

    def of_process(self, name: str, process: str) -> float | None:
        """None: it does not show that."""
        found = (value for labels, value in self.series.get(name, {}).items() if ("process", process) in labels)
        return next(found, None)

    def grown(self, before: "Figures", name: str) -> dict[Labels, float]:
        """Of counters that both looks have: a process that came between has nothing to compare with."""
        old = before.series.get(name, {})
        return {
            labels: max(0.0, value - old[labels])
            for labels, value in self.series.get(name, {}).items()
            if labels in old
        }

    def total_grown(self, before: "Figures", name: str) -> float:
        return sum(self.grown(before, name).values())

    def mean_max_tokens(self) -> int:
        """That requests have asked for at most, so far; 0: no page says so."""
        name = "vllm:request_params_max_tokens"
        num = sum(self.series.get(f"{name}_count", {}).values())
        return math.ceil(sum(self.series.get(f"{name}_sum", {}).values()) / num) if num else 0

    def step_cost(self, role: WorkerRole) -> StepCost | None:
        """The mean of the workers that have measured theirs; None: none of the role has."""
        by_name: dict[str, list[float]] = {}
        for labels, value in self.series.get(_STEP_COST, {}).items():
            if ("role", role) in labels:
                by_name.setdefault(dict(labels).get("coefficient", ""), []).append(value)
        names = ("base_ms", "prefill_token_ms", "prefill_pair_ms", "decode_sequence_ms", "context_token_ms")
        if not all(name in by_name for name in names):
            return None
        return StepCost(*(max(0.0, sum(by_name[name]) / len(by_name[name])) for name in names))


def _is_finite(sample: Sample) -> bool:
    return math.isfinite(sample.value)


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram's growth between two looks, summed over its series."""

    edges: tuple[float, ...]
    counts: tuple[float, ...]
    """Of each bucket alone, the last of them above all edges."""
    total: float

    @classmethod
    def between(cls, before: Figures, now: Figures, name: str) -> "Distribution":
        by_edge: dict[float, float] = {}
        for labels, value in now.grown(before, f"{name}_bucket").items():
            edge = float(dict(labels)["le"])
            by_edge[edge] = by_edge.get(edge, 0.0) + value
        edges = sorted(by_edge)
        cumulated = [by_edge[edge] for edge in edges]
        counts = [value - (cumulated[index - 1] if index else 0.0) for index, value in enumerate(cumulated)]
        finite = tuple(edge for edge in edges if edge < math.inf)
        return cls(finite, tuple(counts), now.total_grown(before, f"{name}_sum"))

    @classmethod
    def so_far(cls, now: Figures, name: str) -> "Distribution":
        """Since the processes started."""
        nothing = {full: dict.fromkeys(series, 0.0) for full, series in now.series.items()}
        return cls.between(Figures(now.at_s, nothing), now, name)

    @property
    def num(self) -> int:
        return round(sum(self.counts))

    def num_within(self, bound: float) -> int:
        """At most so large, as straight lines within buckets have it."""
        met, low = 0.0, 0.0
        for edge, count in zip(self.edges, self.counts, strict=False):
            if edge <= bound:
                met += count
            elif low < bound:
                met += count * (bound - low) / (edge - low)
            low = edge
        return min(self.num, round(met))

    def lengths(self) -> tuple[int, ...]:
        """At most `MAX_LENGTHS` whole numbers that are spread like it and have its mean."""
        lows = (0.0, *self.edges)
        highs = (*self.edges, (self.edges[-1] if self.edges else 1.0) * 2)
        num = self.num
        if num == 0:
            return ()
        keep = min(1.0, MAX_LENGTHS / num)
        drawn: list[float] = []
        owed = 0.0
        for low, high, count in zip(lows, highs, self.counts, strict=False):
            owed += count * keep
            drawn += [(low + high) / 2] * int(owed + 1e-9)
            owed -= int(owed + 1e-9)
        if not drawn or not self.total:
            return ()
        factor = self.total / num / (sum(drawn) / len(drawn))
        return tuple(max(1, round(length * factor)) for length in drawn[:MAX_LENGTHS])


def observation_of(
    before: Figures, now: Figures, counts: Mapping[WorkerRole, PoolCount], ttft_slo_s: float, itl_slo_s: float
) -> Observation:
    """Raises FiguresMissing."""
    ttft, tpot = (Distribution.between(before, now, name) for name in (_TTFT, _TPOT))
    num_cached = now.total_grown(before, "weir_worker_prompt_tokens_cached_total")
    num_computed = now.total_grown(before, "weir_worker_prompt_tokens_computed_total")
    now.gauge("weir_gateway_requests_accepted_total")  # there must be one
    return Observation(
        at_s=now.at_s,
        span_s=now.at_s - before.at_s,
        num_arrived=round(now.total_grown(before, "weir_gateway_requests_accepted_total")),
        prompt_lengths=Distribution.between(before, now, PROMPTS).lengths(),
        output_lengths=Distribution.between(before, now, _OUTPUTS).lengths(),
        num_first_tokens=ttft.num,
        num_ttft_met=ttft.num_within(ttft_slo_s),
        sum_ttft_s=ttft.total,
        num_ended=tpot.num,
        num_itl_met=tpot.num_within(itl_slo_s),
        sum_itl_s=tpot.total,
        cached_share=num_cached / (num_cached + num_computed) if num_cached + num_computed else 0.0,
        num_backlog_tokens=0.0,
        booked_share=_booked_share(now),
        prefill=counts["prefill"],
        decode=counts["decode"],
    )


def with_backlog(seen: Observation, now: Figures, prompts: Sequence[int]) -> Observation:
    """`prompts`: lengths that were seen lately; those that wait are taken to be like them. Raises FiguresMissing."""
    num_waiting = now.gauge("weir_scheduler_requests_queued") + now.gauge("weir_scheduler_prefills_in_flight")
    mean = sum(prompts) / len(prompts) if prompts else 0.0
    return replace(seen, num_backlog_tokens=num_waiting * mean * (1 - seen.cached_share))


def _booked_share(now: Figures) -> float:
    """Of pages or of sequences, whichever is scarcer; of hosts that the gateways reach. Raises FiguresMissing."""
    num_sequences = now.of_those_that_serve().gauge("weir_worker_max_sequences", "decode")
    shares = [now.gauge("weir_scheduler_requests_granted") / max(1.0, num_sequences)]
    num_pages = now.try_gauge("weir_arena_pages")
    if num_pages:
        shares.append(now.gauge("weir_scheduler_reserved_pages") / num_pages)
    return max(shares)
