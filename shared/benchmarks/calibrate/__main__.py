"""`python -m benchmarks.calibrate`: runs both sides, prints and keeps how far they are apart."""

import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.calibrate.live import CalibrationReport, LoadRun
from benchmarks.calibrate.live import calibrate as run_calibration
from benchmarks.calibrate.loads import ALLOWED_ERROR, CalibrateConfig, LoadComparison, comparisons, cost_line
from weir.cli import EXIT_USAGE, options
from weir.cli.console import fail, stderr

_SHOWN = {
    "mean_ttft_s": ("mean TTFT, ms", 1000.0),
    "mean_itl_s": ("mean ITL, ms", 1000.0),
    "output_tok_per_s": ("output tokens/s", 1.0),
}


def calibrate(
    model: Annotated[str, typer.Option(help="Known name, GGUF file or Hugging Face folder.")] = "smollm2-135m",
    loads: Annotated[str, typer.Option(help="Parts of what the stack serves when all comes at once.")] = "0.5,0.8",
    num_requests: Annotated[int, typer.Option(min=2, help="Of a round.")] = 60,
    rounds: Annotated[int, typer.Option(min=2, help="Of each load, real and simulated in turns.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths, prompts and arrivals.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also write calibration.md and calibration.json here.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """How far simulated latencies and throughput are from those of a stack on this machine, which this starts.

    Steps cost what its workers have fitted to those before the round; delays are measured with one request at a time.

    \b
    python -m benchmarks.calibrate --rounds 3 --out results
    """
    try:
        parts = tuple(float(part) for part in loads.split(","))
        config = CalibrateConfig(model, parts, num_requests, rounds, seed=seed)
    except ValueError as error:
        fail(f"--loads {loads}: {error}", code=EXIT_USAGE)
    load_before = os.getloadavg()[0]
    try:
        found = run_calibration(config, lambda what: stderr.print(what, markup=False, highlight=False))
    except (RuntimeError, OSError) as error:
        fail(f"python -m benchmarks.calibrate: {error}")
    text = report(config, found, load_before)
    values = json.dumps(as_dict(config, found, load_before), indent=1)
    print(values if as_json else text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "calibration.md").write_text(text)
        (out / "calibration.json").write_text(values + "\n")


def as_dict(config: CalibrateConfig, found: CalibrationReport, load_before: float) -> dict[str, object]:
    """Everything, with what the rounds come to."""
    compared = [
        {
            "load": run.load,
            "figure": one.figure,
            "error": one.error,
            "real_spread": one.spread,
            "error_beyond": one.error_beyond,
            "is_within": one.is_within,
        }
        for run in found.loads
        for one in comparisons(run.rounds)
    ]
    config_and_found = {"config": asdict(config), "load_average_before": load_before, "measured": asdict(found)}
    return config_and_found | {"compared": compared}


def report(config: CalibrateConfig, found: CalibrationReport, load_before: float) -> str:
    """As Markdown."""
    return "\n".join([*_head(config, found, load_before), *_tables(found), *_foot(config, found)]) + "\n"


def _head(config: CalibrateConfig, found: CalibrationReport, load_before: float) -> Iterator[str]:
    yield "# The simulator beside the stack\n"
    yield (
        f"One prefill and one decode worker of {config.model} share {len(os.sched_getaffinity(0))} cores with all else"
        f" of the stack and with the client; load average before: {load_before:.1f}. {config.num_requests} requests a"
        f" round, Poisson; prompts of {config.prompt_len[0]} to {config.prompt_len[1]} tokens, answers of"
        f" {config.output_len[0]} to {config.output_len[1]}, both even by their logarithm; every round of a load sends"
        f" the same. Each of {config.rounds} rounds is simulated first and served then. Loads are parts of"
        f" {found.capacity_a_s:.2f} requests/s, which is what was served when all came at once.\n"
    )
    yield (
        f"Intervals: lowest and highest round, which hold the median with {1 - 2.0 ** (1 - config.rounds):.1%}."
        " Error: simulated median by the real one, less 1. Beyond: how far the simulated median lies outside of the"
        f" real rounds; at most {ALLOWED_ERROR:.0%} is wanted.\n"
    )


def _tables(found: CalibrationReport) -> Iterator[str]:
    yield "| load | figure | real | simulated | error | real rounds | beyond | |"
    yield "|---|---|---|---|---|---|---|---|"
    for run in found.loads:
        for one in comparisons(run.rounds):
            yield _row(run, one)
    all_compared = [one for run in found.loads for one in comparisons(run.rounds)]
    yield f"\n{sum(one.is_within for one in all_compared)} of {len(all_compared)} figures are within.\n"


def _row(run: LoadRun, one: LoadComparison) -> str:
    name, scale = _SHOWN[one.figure]
    sides = [
        f"{scale * statistics.median(side):.1f} [{scale * min(side):.1f}, {scale * max(side):.1f}]"
        for side in (one.real, one.simulated)
    ]
    low, high = one.spread
    verdict = "within" if one.is_within else "**outside**"
    return (
        f"| {run.load:g} ({run.rate_a_s:.2f}/s) | {name} | {sides[0]} | {sides[1]} | {one.error:+.1%} |"
        f" {low:+.1%} … {high:+.1%} | {one.error_beyond:+.1%} | {verdict} |"
    )


def _foot(config: CalibrateConfig, found: CalibrationReport) -> Iterator[str]:
    yield "## What the simulation was given\n"
    over = found.overheads
    hand_off = "never seen, so the profile's default" if over.hand_off_ms is None else f"{over.hand_off_ms:.2f} ms"
    yield (
        f"- Delays, from requests sent one by one (first token of a one-token prompt {over.idle_ttft_ms:.1f} ms, later"
        f" ones {over.idle_itl_ms:.1f} ms each): {over.message_ms:.2f} ms a message between gateway and scheduler or"
        f" worker, four of them to a first token; hand-off {hand_off}. Nothing is tuned to the rounds."
    )
    yield (
        f"- Costs of steps: the mean that both workers had fitted to their own steps, newest 4,096, when a round"
        f" began, after {found.num_warm_ups} other loads of the same kind: in ms while the other worker does not"
        " compute, and by what part longer while it does (contention). Those of the last round:"
    )
    for role in ("prefill", "decode"):
        quality = found.fit_quality[role]
        costs = found.loads[-1].costs[-1]
        yield f"  - {cost_line(role, getattr(costs, role), getattr(costs, f'{role}_contention'))}"
        yield (
            f"    (after the warm-up: {quality['steps']:.0f} steps, R2 {quality['r2']:.2f}, measured by usual"
            f" {quality['error_p05']:+.0%} … {quality['error_p95']:+.0%} from p5 to p95)"
        )
    yield ""
    yield "## What else differed\n"
    for run in found.loads:
        real = statistics.fmean(one.real_local_share for one in run.rounds)
        simulated = statistics.fmean(one.simulated_local_share for one in run.rounds)
        yield f"- At {run.load:g} the decode worker prefilled {real:.0%} of the prompts, simulated {simulated:.0%}."
    yield (
        "- All real processes share the cores; simulated workers slow each other down, but gateway, client and the"
        " rest take no time from them, and messages take what they take on an idle stack."
    )
    loads = ",".join(f"{load:g}" for load in config.loads)
    yield (
        f"\nAgain: `python -m benchmarks.calibrate --loads {loads} --num-requests {config.num_requests}"
        f" --rounds {config.rounds} --seed {config.seed} --out shared/docs/results`"
    )


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(calibrate)
    app(prog_name="python -m benchmarks.calibrate")
