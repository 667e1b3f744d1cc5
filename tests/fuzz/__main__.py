"""`python -m tests.fuzz --target gguf --minutes 60`; without a target all of them in turn, the time divided among them.

What is found lies in build/fuzz/TARGET/findings, with a report beside it; mend it, and put the input into
tests/fuzz/corpus/TARGET. Ends with 1 where something was found.
"""

import argparse
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.target import ROOT

_LEAST_S = 5


@dataclass
class Tally:
    """Of one target."""

    num_executions: int = 0
    num_edges: int = 0
    num_ended: int = 0
    """Processes that ended before their time."""


def run_target(name: str, seconds: float, folder: Path) -> Tally:
    """In one process after the other, as long as there is time."""
    tally = Tally()
    folder.mkdir(parents=True, exist_ok=True)
    ends_at_s = time.monotonic() + seconds
    while (left_s := round(ends_at_s - time.monotonic())) >= _LEAST_S:
        command = [sys.executable, "-m", "tests.fuzz.coverage_guided", name, str(left_s), str(folder)]
        with (folder / "log").open("wb") as log:
            code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False).returncode
        text = (folder / "log").read_text(errors="replace")
        tally.num_executions += max(map(int, re.findall(r"^#(\d+)\t", text, re.MULTILINE)), default=0)
        tally.num_edges = max(tally.num_edges, *map(int, re.findall(r"\bcov: (\d+)", text)), 0)
        if code == 0:
            break
        tally.num_ended += 1
        if "INITED" not in text:
            raise SystemExit(f"{name}: {text[-2000:]}")
    return tally


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", action="append", help="Name of a target; may be given several times.")
    parser.add_argument("--minutes", type=float, default=60.0, help="Of all targets together.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "fuzz")
    given = parser.parse_args(argv)
    try:
        import atheris  # noqa: F401, PLC0415 - no part of the tools of everybody: 35 MB
    except ImportError:
        parser.error("atheris is not installed: `pip install atheris`, or `make fuzz`")
    from tests.fuzz.all_targets import TARGETS  # noqa: PLC0415 - help does not wait for it

    names = given.target or list(TARGETS)
    unknown = sorted(set(names) - TARGETS.keys())
    if unknown:
        parser.error(f"--target {unknown[0]!r}: is none of {', '.join(TARGETS)}")
    rows = ["| target | executions | edges | findings |", "|---|---|---|---|"]
    num_found = 0
    for name in names:
        folder = given.out / name
        tally = run_target(name, 60 * given.minutes / len(names), folder)
        found = [*folder.glob("findings/*.txt"), *folder.glob("artifacts/*")]
        num_found += len(found)
        rows.append(f"| {name} | {tally.num_executions} | {tally.num_edges} | {len(found)} |")
        print(rows[-1], *(f"    {path.name}" for path in found), sep="\n", flush=True)
    (given.out / "report.md").write_text("\n".join(rows) + "\n")
    return 1 if num_found else 0


if __name__ == "__main__":
    raise SystemExit(main())
