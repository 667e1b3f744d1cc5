"""What a run comes to, as figures and as a table."""

import os
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.overload.client import Shot
from benchmarks.overload.experiment import OverloadConfig, OverloadRun
from weir.bench.serving.figures import p99

Figures = dict[str, float]
_UNITS: Mapping[str, str] = {"_ms": " ms", "_s": " s", "_mib": " MiB"}


def figures(config: OverloadConfig, run: OverloadRun) -> dict[str, Figures]:
    """Part of the experiment -> figure -> value."""
    peak_a_s = statistics.fmean(run.peak_rates_a_s)
    in_time = [shot for shot in run.flood + run.beside if shot.is_whole and _ttft_s(shot) <= 1.5 * config.max_wait_s]
    began_s = min(shot.sent_s for shot in run.flood)
    num_in_time = sum(shot.ended_s <= began_s + config.flood_s for shot in in_time)
    return {
        "peak": {"before_requests/s": run.peak_rates_a_s[0], "after_requests/s": run.peak_rates_a_s[1]},
        "flood": {
            **_counts(run.flood),
            **_refusals(run.flood),
            "goodput_ratio": num_in_time / config.flood_s / peak_a_s,
            "ttft_p50_ms": _percentile(_ttfts_ms(run.flood), 0.5),
            "ttft_p99_ms": _percentile(_ttfts_ms(run.flood), 0.99),
        },
        "other tenant, alone": _served(run.alone),
        "other tenant, beside the flood": _served(run.beside),
        "normal after": {"other_tenant_s": run.normal_after_s[0], "flooding_tenant_s": run.normal_after_s[1]},
        "burst": {
            **_counts(run.burst),
            **_refusals(run.burst),
            "refusal_last_ms": _last_refusal_ms(run.burst),
        },
        "idle connections": {"held": float(run.num_idle_held), **_served(run.idle)},
        "anonymous memory, at most": {
            f"{name}_mib": most / (1 << 20) for name, most in sorted(run.max_bytes.items()) if most
        },
    }


def table(config: OverloadConfig, found: Mapping[str, Figures], loads: tuple[float, float]) -> str:
    """As Markdown. `loads`: the machine's before and after."""
    lines = [
        f"Prompts of {config.input_len} tokens, answers of {config.output_len}; one lane with max_wait_s "
        f"{config.max_wait_s:g}; flood of {config.factor:g} times the peak for {config.flood_s:g} s, the other tenant "
        f"at {config.other_part:g} of the peak; {os.cpu_count()} cores, load of the machine {loads[0]:.1f} before, "
        f"{loads[1]:.1f} after.",
        "",
        "| part | figure | value |",
        "|---|---|---|",
    ]
    for part, values in found.items():
        lines += [f"| {part} | {_name(name)} | {_value(name, value)} |" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def _counts(shots: Sequence[Shot]) -> Figures:
    num_refused = sum(shot.is_refused for shot in shots)
    num_whole = sum(shot.is_whole and shot.status == 200 for shot in shots)
    return {
        "requests": len(shots),
        "served": num_whole,
        "refused": num_refused,
        "neither": len(shots) - num_whole - num_refused,
    }


def _refusals(shots: Sequence[Shot]) -> Figures:
    """Those that waited in the queue, and were given up there, are no refusals on arrival."""
    refused = _refused_on_arrival(shots)
    waits_ms = [1000 * (shot.answered_s - shot.sent_s) for shot in refused]
    return {
        "given_up_while_they_waited": sum(shot.is_refused for shot in shots) - len(refused),
        "refusal_p50_ms": _percentile(waits_ms, 0.5),
        "refusal_p99_ms": _percentile(waits_ms, 0.99),
        "retry_after_p50_s": _percentile([shot.retry_after_s for shot in refused], 0.5),
        "without_retry_after": sum(shot.retry_after_s == 0 for shot in refused),
    }


def _refused_on_arrival(shots: Sequence[Shot]) -> list[Shot]:
    return [shot for shot in shots if shot.is_refused and not shot.was_given_up]


def _last_refusal_ms(shots: Sequence[Shot]) -> float:
    """From the first request sent on."""
    began_s = min(shot.sent_s for shot in shots)
    return max((1000 * (shot.answered_s - began_s) for shot in _refused_on_arrival(shots)), default=0.0)


def _served(shots: Sequence[Shot]) -> Figures:
    return {
        **_counts(shots),
        "ttft_p50_ms": _percentile(_ttfts_ms(shots), 0.5),
        "ttft_p99_ms": _percentile(_ttfts_ms(shots), 0.99),
    }


def _ttft_s(shot: Shot) -> float:
    return shot.first_s - shot.sent_s


def _ttfts_ms(shots: Sequence[Shot]) -> list[float]:
    return [1000 * _ttft_s(shot) for shot in shots if shot.is_whole]


def _percentile(values: Sequence[float], part: float) -> float:
    """0.0 of none."""
    if not values:
        return 0.0
    return statistics.median(values) if part == 0.5 else p99(values)


def _name(name: str) -> str:
    unit = next((unit for unit in _UNITS if name.endswith(unit)), "")
    return name.removesuffix(unit).replace("_", " ")


def _value(name: str, value: float) -> str:
    unit = next((shown for suffix, shown in _UNITS.items() if name.endswith(suffix)), "")
    return f"{value:.2f}{unit}" if value != round(value) and value < 100 else f"{value:,.0f}{unit}"
