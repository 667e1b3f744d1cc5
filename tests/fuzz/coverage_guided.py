"""One target, by atheris (libFuzzer over instrumented bytecode): `python -m tests.fuzz.coverage_guided NAME SECONDS
FOLDER`. A process of its own, which a crash or a hang ends.

FOLDER/corpus     inputs that reached something new
FOLDER/findings   one input for each place where something went wrong, and what it was
FOLDER/artifacts  inputs that ended the process, by libFuzzer
"""

import contextlib
import hashlib
import re
import sys
from pathlib import Path

import atheris

INSTRUMENTED = ["weir", "weir_gateway", "weir_transfer", "weir_scheduler"]
COMPILED_ELSEWHERE = ["weir.ops", "weir.wire"]
"""What numba reads as bytecode, and what is generated."""
_TIMEOUT_S = 20
_RSS_LIMIT_MB = 4096

with atheris.instrument_imports(include=INSTRUMENTED, exclude=COMPILED_ELSEWHERE):
    from tests.fuzz.all_targets import TARGETS
    from tests.fuzz.target import Finding, Target, run_input


def keep_finding(folder: Path, finding: Finding, data: bytes) -> None:
    """The first of each place; its shortest input."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", finding.place)[:120] or hashlib.sha1(data).hexdigest()
    path = folder / name
    if path.exists() and path.stat().st_size <= len(data):
        return
    path.write_bytes(data)
    path.with_suffix(".txt").write_text(str(finding))


def main(name: str, seconds: int, folder: Path) -> None:
    """Ends the process."""
    target: Target = TARGETS[name]
    corpus, findings, artifacts = (folder / part for part in ("corpus", "findings", "artifacts"))
    for part in (corpus, findings, artifacts):
        part.mkdir(parents=True, exist_ok=True)
    for data in target.kept_inputs():
        (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
    with contextlib.ExitStack() as stack:
        check = stack.enter_context(target.open())

        def run(data: bytes) -> None:
            try:
                run_input(target, check, data)
            except Finding as finding:
                keep_finding(findings, finding, data)

        options = {
            "max_total_time": seconds,
            "max_len": target.max_bytes,
            "timeout": _TIMEOUT_S,
            "rss_limit_mb": _RSS_LIMIT_MB,
            "print_final_stats": 1,
            "artifact_prefix": f"{artifacts}/",
        }
        atheris.Setup([name, *(f"-{key}={value}" for key, value in options.items()), str(corpus)], run)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
