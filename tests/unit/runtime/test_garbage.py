"""Rare full collections: while the scheduler and its benchmark run, and no longer."""

import gc

import pytest

import weir_scheduler.__main__ as scheduler
from weir.bench import scheduler as bench
from weir.runtime.garbage import rare_full_collections

_RARE = (*gc.get_threshold()[:2], 1000)


def end_badly() -> None:
    with rare_full_collections():
        raise RuntimeError(gc.get_threshold())


def test_full_collections_are_rare_as_long_as_it_is_asked_for_also_if_it_ends_badly() -> None:
    before = gc.get_threshold()
    with pytest.raises(RuntimeError) as ended:
        end_badly()
    assert ended.value.args == (_RARE,)
    assert before == gc.get_threshold() != _RARE


def test_a_scheduler_runs_with_rare_full_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run_service(*_: object, **__: object) -> int:
        seen.append(gc.get_threshold())
        return 3

    monkeypatch.setattr(scheduler, "run_service", run_service)
    monkeypatch.setattr(scheduler, "load_config", lambda *_, **__: None)
    assert scheduler.main() == 3
    assert seen == [_RARE]


def test_decisions_are_measured_as_the_scheduler_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def measure(*_: object) -> bench.DecisionCost:
        seen.append(gc.get_threshold())
        return bench.DecisionCost("fcfs", 1, 1, 1.0, 1.0, 1.0)

    monkeypatch.setattr(bench, "measure", measure)
    config = bench.SchedulerBenchConfig(policies=("fcfs",), queued=(1,), pairs=(1,))
    assert bench.main(config, as_json=True) == 0
    assert seen == [_RARE]
