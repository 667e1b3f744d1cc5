"""Seeds of the planner's replays take hours together: what one run has found, the next one goes on from."""

import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.planner.__main__ import read_results, tasks_left
from benchmarks.planner.replay import ArmOutcome

FOUND = ArmOutcome(worker_s=1234.0, attainment=0.95, p99_ttft_s=2.0, num_changes=3)


def test_only_what_the_file_lacks_is_run(tmp_path: Path) -> None:
    file = tmp_path / "planner.json"
    file.write_text(json.dumps({"day": [{"mean": asdict(FOUND)}], "azure": [{"hpa": asdict(FOUND)}]}))
    results = read_results(file)
    assert tasks_left(results, ["day"], 2, ["mean", "hpa"]) == [
        ("day", 0, "hpa"),
        ("day", 1, "mean"),
        ("day", 1, "hpa"),
    ]
    assert results["day"][0] == {"mean": FOUND}
    assert results["azure"] == [{"hpa": FOUND}], "what was not asked for stays"


def test_fewer_seeds_than_there_are_leave_nothing_to_do() -> None:
    assert tasks_left({"day": [{"mean": FOUND}, {"mean": FOUND}, {}]}, ["day"], 1, ["mean"]) == []
