"""What a run came to, as a page."""

import os
import platform
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.driver.faults import FaultLog
from tests.chaos.driver.memory import MAX_MIB
from tests.chaos.driver.traffic import Tally


@dataclass(frozen=True)
class Outcome:
    """`problems`: everything that must not be, in sentences; `not_made`: faults that this machine does not let us
    make."""

    command: str
    duration_s: float
    faults: FaultLog
    tally: Tally
    max_mib: dict[str, float]
    problems: list[str]
    not_made: list[str]


def report(outcome: Outcome) -> str:
    """Markdown."""
    tally, faults = outcome.tally, outcome.faults.faults
    recoveries_s = [fault.recovery_s for fault in faults]
    num_refused = sum(tally.refusals.values())
    lines = [
        f"# Streams amid faults: `{outcome.command}`",
        "",
        f"Made by that command in {outcome.duration_s / 60:.1f} minutes on {len(os.sched_getaffinity(0))} cores of "
        f"{platform.machine()}, load {os.getloadavg()[0]:.1f}.",
        "",
        f"- **{len(faults)} faults**; the victim, or who took its place, ready after {quantiles(recoveries_s)}",
        f"- **{tally.num_streams} streams** with {tally.num_tokens} tokens; longest pause of a stream"
        f" {quantiles(tally.pauses_s)}",
        f"- **{len(tally.lost)} lost, {len(tally.wrong)} wrong**, {len(outcome.problems)} problems in all",
        f"- {tally.num_cancelled} cancelled by their clients",
        f"- {tally.num_resumed} broken with their gateway and gone on with under their key;"
        f" {tally.num_ended_with_gateway} without a key, which ended with it",
        f"- {num_refused} calls refused before a first token, and sent again",
        "",
        *fault_table(outcome.faults),
        "",
        "| role | most memory of its own, MiB | bound |",
        "|---|---|---|",
        *(f"| {role} | {outcome.max_mib.get(role, 0):.0f} | {bound} |" for role, bound in MAX_MIB.items()),
    ]
    lines += titled_list("Refused with", [f"{count}: {reason}" for reason, count in tally.refusals.most_common(12)])
    lines += titled_list("Not made here", outcome.not_made)
    lines += titled_list("Problems", outcome.problems)
    return "\n".join(lines) + "\n"


def fault_table(log: FaultLog) -> list[str]:
    """In Markdown."""
    lines = ["| fault | of | while it was | times | ready after |", "|---|---|---|---|---|"]
    by_kind = defaultdict(list)
    for fault in log.faults:
        by_kind[fault.kind, fault.role, fault.doing].append(fault.recovery_s)
    for (kind, role, doing), recoveries_s in sorted(by_kind.items()):
        lines.append(f"| {kind} | {role} | {doing} | {len(recoveries_s)} | {quantiles(recoveries_s)} |")
    return lines


def titled_list(title: str, entries: Sequence[str]) -> list[str]:
    """In Markdown; nothing where there are no entries."""
    return ["", f"{title}:", "", *(f"- {entry}" for entry in entries)] if entries else []


def quantiles(values: Sequence[float]) -> str:
    if not values:
        return "-"
    if len(values) < 2:
        return f"{values[0]:.2f} s"
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return f"p50 {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s"
