"""Busy workers share the cores; who is idle, or dead, takes none."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from weir.worker.engine.core_budget import NUM_SLOTS, SLOT_BYTES, CoreBudget


@pytest.mark.parametrize(
    ("num_cores", "num_busy", "share"), [(2, 1, 2), (2, 2, 1), (2, 3, 1), (8, 2, 4), (8, 3, 2), (1, 2, 1)]
)
def test_the_cores_are_shared_by_those_that_compute(num_cores: int, num_busy: int, share: int, tmp_path: Path) -> None:
    budgets = [CoreBudget(tmp_path / "cores", num_cores) for _ in range(num_busy + 1)]
    for other in budgets[1:num_busy]:
        other.begin()
    assert budgets[0].begin() == share


def test_a_share_is_larger_again_when_the_others_have_ended(tmp_path: Path) -> None:
    first, second = (CoreBudget(tmp_path / "cores", 4) for _ in range(2))
    assert first.begin() == 4
    assert second.begin() == 2
    first.end()
    assert second.begin() == 4
    second.end()
    assert first.begin() == 4


def test_it_knows_how_many_others_computed_beside_its_work(tmp_path: Path) -> None:
    """Looked at where each piece of work begins and ends: 0 and 1 others, then 1 and 2."""
    first, second, third = (CoreBudget(tmp_path / "cores", 4) for _ in range(3))
    first.begin()
    second.begin()
    first.end()
    first.begin()
    third.begin()
    first.end()
    assert first.take_mean_others() == 1.0
    assert first.take_mean_others() == 0.0, "only since it was last asked"


def test_what_a_killed_worker_left_in_the_file_does_not_count(tmp_path: Path) -> None:
    budget = CoreBudget(tmp_path / "cores", 4)
    program = (
        "import sys, time; from pathlib import Path; from weir.worker.engine.core_budget import CoreBudget;"
        "CoreBudget(Path(sys.argv[1]), 4).begin(); print('busy', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "cores")], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "busy\n"
        assert budget.begin() == 2
        os.kill(other.pid, signal.SIGKILL)
    assert budget.begin() == 4
    assert (tmp_path / "cores").read_bytes()[::SLOT_BYTES].count(1) == 2, "its mark is still there"


def test_the_slot_of_a_worker_that_ended_while_busy_is_taken_clean(tmp_path: Path) -> None:
    first = CoreBudget(tmp_path / "cores", 2)
    first.begin()
    first.close()
    second, third = (CoreBudget(tmp_path / "cores", 2) for _ in range(2))
    assert third.begin() == 2
    assert second.begin() == 1


def test_more_workers_than_slots_is_an_error(tmp_path: Path) -> None:
    held = [CoreBudget(tmp_path / "cores", 2) for _ in range(NUM_SLOTS)]
    with pytest.raises(OSError, match="256 slots are taken"):
        CoreBudget(tmp_path / "cores", 2)
    for budget in held:
        budget.close()


def test_no_core_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_cores is 0"):
        CoreBudget(tmp_path / "cores", 0)
