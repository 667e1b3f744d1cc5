"""What `python -m benchmarks.calibrate` prints and keeps."""

import json
from dataclasses import replace

from benchmarks.calibrate.live import CalibrationReport, Costs, LoadRun
from benchmarks.calibrate.loads import CalibrateConfig, LoadFigures, Overheads, Round
from benchmarks.calibrate.report import as_dict, report
from weir.core.cost import StepCost

COST = StepCost(4.0, 0.5, 0.0, 1.0, 0.0)
REAL = LoadFigures(0.100, 0.010, 50.0)
FAST = LoadFigures(0.050, 0.010, 50.0)
CONFIG = CalibrateConfig(loads=(0.5,), rounds=2)
QUALITY = {"steps": 100.0, "r2": 0.9, "error_p05": -0.1, "error_p95": 0.2}


def found(simulated: LoadFigures) -> CalibrationReport:
    rounds = (Round(REAL, simulated, 0.2, 0.4),) * 2
    run = LoadRun(0.5, 1.5, rounds, (Costs(COST, COST),) * 2)
    overheads = Overheads(2.0, None, 20.0, 12.0)
    return CalibrationReport(overheads, 3.0, 1000, 2, (run,), {"prefill": QUALITY, "decode": QUALITY})


def test_the_table_has_both_sides_the_error_and_the_verdict() -> None:
    text = report(CONFIG, found(FAST), load_before=0.0)
    assert "| 0.5 (1.50/s) | mean TTFT, ms | 100.0 [100.0, 100.0] | 50.0 [50.0, 50.0] | -50.0% |" in text
    assert text.count("**outside**") == 1
    assert "2 of 3 figures are within." in text
    assert "prefilled 20% of the prompts, simulated 40%" in text
    assert "hand-off never seen" in text


def test_what_is_kept_can_be_read_again_and_says_the_same() -> None:
    values = json.loads(json.dumps(as_dict(CONFIG, found(REAL), load_before=1.0)))
    assert [(one["figure"], one["error"], one["is_within"]) for one in values["compared"]] == [
        ("mean_ttft_s", 0.0, True),
        ("mean_itl_s", 0.0, True),
        ("output_tok_per_s", 0.0, True),
    ]
    assert values["measured"]["loads"][0]["rounds"][0]["simulated_local_share"] == 0.4


def test_a_measured_hand_off_is_values() -> None:
    calibration = found(REAL)
    seen = replace(calibration, overheads=replace(calibration.overheads, hand_off_ms=3.25))
    assert "hand-off 3.25 ms" in report(CONFIG, seen, load_before=0.0)
