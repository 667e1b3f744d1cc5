"""What the records of a run come to, by the definitions and under the keys of `vllm bench serve`.

| figure | of | is |
|--------|----|----|
| TTFT | a request | first chunk - its start |
| TPOT | a request of 2 tokens and more | (E2EL - TTFT) / (output tokens - 1) |
| ITL | a gap between two chunks | as it was seen: a chunk may hold several tokens |
| E2EL | a request | last chunk - its start |

Percentiles are linear between the two nearest values, as numpy's. Goodput counts the requests that kept every target; a
single token has no gap, and so keeps every target of TPOT. What failed has no figures and is counted beside them.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weir.bench.serving.records import ServedRequest

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_GOODPUT_METRICS = ("ttft", "tpot", "e2el")
MAX_PERCENTILES = 16
REFUSED_STATUSES = frozenset({429, 503})
_GROUPS: Mapping[str, Callable[[ServedRequest], str]] = {
    "lanes": lambda record: record.lane,
    "tenants": lambda record: record.tenant,
}


@dataclass(frozen=True, slots=True)
class Reporting:
    """What is made of the records: targets of goodput in ms by metric, and which percentiles of which metrics."""

    goodput_ms: Mapping[str, float]
    percentile_metrics: tuple[str, ...] = tuple(METRICS)
    percentiles: tuple[float, ...] = (99.0,)

    @classmethod
    def parse(cls, goodput: Sequence[str], metrics: str, percentiles: str) -> "Reporting":
        """Of `ttft:300`, `ttft,tpot` and `50,99`. Raises ValueError naming the flag and the part."""
        names = tuple(name.strip() for name in metrics.split(",") if name.strip())
        for name in names:
            if name not in METRICS:
                raise ValueError(f"percentile-metrics {metrics!r}: {name!r} is none of {', '.join(METRICS)}")
        return cls(_parse_goodput(goodput), names, _parse_percentiles(percentiles))


def _parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    targets: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        try:
            value_ms = float(text)
        except ValueError:
            value_ms = -1.0
        if name not in _GOODPUT_METRICS or name in targets or not 0 <= value_ms < math.inf:
            form = f"must be METRIC:MS with one of {', '.join(_GOODPUT_METRICS)}, each once, and at least 0 ms"
            raise ValueError(f"goodput {pair!r}: {form}")
        targets[name] = value_ms
    return targets


def _parse_percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not 1 <= len(values) <= MAX_PERCENTILES or not all(0 <= value <= 100 for value in values):
        raise ValueError(f"metric-percentiles {text!r}: must be 1 to {MAX_PERCENTILES} numbers of [0, 100]: 50,90,99")
    return values


NO_TARGETS = Reporting({})


def summarize(records: Sequence[ServedRequest], duration_s: float) -> dict[str, float]:
    """The keys of `vllm bench serve`; latencies in ms, 0 where nothing was served."""
    done = [record for record in records if not record.error]
    num_output = sum(record.output_len for record in done)
    num_input = sum(record.input_len for record in done)
    result: dict[str, float] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": float(peak_tokens_a_second(done)),
        "max_concurrent_requests": float(peak_concurrency(done)),
    }
    for name, values_s in series_of(done).items():
        result |= {f"{key}_{name}_ms": 1000 * value for key, value in _statistics(values_s).items()}
    return result


def series_of(done: Sequence[ServedRequest]) -> dict[str, list[float]]:
    """Metric -> its values in seconds."""
    return {
        "ttft": [record.ttft_s for record in done],
        "tpot": [record.tpot_s for record in done if record.output_len > 1],
        "itl": [gap for record in done for gap in record.gaps_s],
        "e2el": [record.latency_s for record in done],
    }


def more_figures(
    records: Sequence[ServedRequest], duration_s: float, reporting: Reporting
) -> dict[str, float | int | None]:
    """What `summarize` has not: goodput, the percentiles that were asked for, and what the client itself delayed.

    `client_lateness`: from when a request was due to when this process sent it, which is part of its latency in an
    open loop. `client_queue_time`: waited here for room below the concurrency, no part of it.
    """
    done = [record for record in records if not record.error]
    result: dict[str, float | int | None] = {"request_goodput": None}
    if reporting.goodput_ms:
        result["request_goodput"] = num_good(done, reporting.goodput_ms) / duration_s
    series = series_of(done)
    for name in reporting.percentile_metrics:
        result |= {
            f"p{percentile_word(p)}_{name}_ms": 1000 * percentile(series[name], p) for p in reporting.percentiles
        }
    own = {
        "client_lateness": [record.late_s for record in records],
        "client_queue_time": [record.queued_s for record in records],
    }
    for name, values in own.items():
        result |= {
            f"mean_{name}_ms": 1000 * statistics.fmean(values or [0.0]),
            f"p99_{name}_ms": 1000 * percentile(values, 99),
            f"max_{name}_ms": 1000 * max(values, default=0.0),
        }
    return result


def num_good(done: Iterable[ServedRequest], targets_ms: Mapping[str, float]) -> int:
    """Requests that kept every target."""
    return sum(_is_good(record, targets_ms) for record in done)


def _is_good(record: ServedRequest, targets_ms: Mapping[str, float]) -> bool:
    tpot_s = record.tpot_s if record.output_len > 1 else 0.0
    seen_s = {"ttft": record.ttft_s, "tpot": tpot_s, "e2el": record.latency_s}
    return all(seen_s[name] <= target_ms / 1000 for name, target_ms in targets_ms.items())


def summarize_groups(records: Sequence[ServedRequest], duration_s: float) -> dict[str, dict[str, dict[str, float]]]:
    """The same figures of each lane and of each tenant, where requests named any.

    `refused` of the failed: asked at once to come later (429 or 503).
    """
    groups: dict[str, dict[str, dict[str, float]]] = {}
    for key, name_of in _GROUPS.items():
        names = sorted({name_of(record) for record in records} - {""})
        if names:
            groups[key] = {
                name: _summarize_group([record for record in records if name_of(record) == name], duration_s)
                for name in names
            }
    return groups


def _summarize_group(records: Sequence[ServedRequest], duration_s: float) -> dict[str, float]:
    refused = sum(record.status in REFUSED_STATUSES for record in records)
    return {**summarize(records, duration_s), "refused": float(refused)}


def percentile(values: Sequence[float], p: float) -> float:
    """Linear between the nearest two; 0 of nothing."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    place = p / 100 * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentile_word(p: float) -> str:
    """`99` or `99.9`, as keys have it."""
    return f"{p:g}"


def peak_concurrency(done: Sequence[ServedRequest]) -> int:
    """Most requests at one moment, each from its start up to but without its end."""
    moments = [(record.started_s, 1) for record in done]
    moments += [(record.started_s + record.latency_s, -1) for record in done]
    running = peak = 0
    for _, change in sorted(moments):
        running += change
        peak = max(peak, running)
    return peak


def peak_tokens_a_second(done: Sequence[ServedRequest]) -> int:
    """Most chunks within one of the run's seconds: as vLLM counts, a chunk for a token."""
    began_s = min((record.started_s for record in done), default=0.0)
    counts: dict[int, int] = {}
    for record in done:
        at_s = record.started_s + record.ttft_s - began_s
        for gap_s in (0.0, *record.gaps_s):
            at_s += gap_s
            counts[int(at_s)] = counts.get(int(at_s), 0) + 1
    return max(counts.values(), default=0)


def _statistics(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return dict.fromkeys(("mean", "median", "std", "p99"), 0.0)
    return {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "std": statistics.pstdev(values),
        "p99": percentile(values, 99),
    }


def p99(values: Iterable[float]) -> float:
    """The nearest of the values, of which there must be one: of few, no number that nobody saw."""
    ordered = sorted(values)
    return ordered[round(0.99 * (len(ordered) - 1))]
