"""A worker fits what its steps cost, not more often than every few seconds, and its engine gets to know."""

import asyncio
import random

import pytest
from tests.unit.worker.rig import Rig, eventually

from weir.core.clock import ManualClock
from weir.core.cost import PromptChunk, StepCost
from weir.engine.loop import InboxFull
from weir.engine.messages import Command, EngineReport, SetCost, StepTiming
from weir.engine.plan import StepLoad
from weir.worker.engine.cost_meter import CostMeter

COST = StepCost(4.0, 0.1, 0.0, 0.5, 0.001)


async def test_the_engine_gets_what_its_steps_cost(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[Command] = []
    monkeypatch.setattr("weir.worker.shell._SWEEP_S", 0.01)
    monkeypatch.setattr(rig.decode.shell._cost_meter, "cost", lambda: COST)
    monkeypatch.setattr(rig.decode.shell._host, "post", posted.append)
    await eventually(lambda: SetCost(COST) in posted)
    await asyncio.sleep(0.2)
    assert posted.count(SetCost(COST)) == 1, "once, and not every sweep"


async def test_an_engine_with_a_full_inbox_gets_it_later(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[Command] = []
    refusals = [InboxFull("full"), InboxFull("full")]

    def post(command: Command) -> None:
        if refusals:
            raise refusals.pop()
        posted.append(command)

    monkeypatch.setattr("weir.worker.shell._SWEEP_S", 0.01)
    monkeypatch.setattr(rig.decode.shell._cost_meter, "cost", lambda: COST)
    monkeypatch.setattr(rig.decode.shell._host, "post", post)
    await eventually(lambda: posted == [SetCost(COST)])
    assert rig.decode.shutdowns == []


def report(chance: random.Random, cost: StepCost, contention: float = 0.0) -> EngineReport:
    num_prefill, num_decodes = chance.choice([0, 0, 16, 128]), chance.randint(1, 16)
    chunks = [PromptChunk(num_prefill)] if num_prefill else []
    others = chance.choice([0.0, 0.5, 1.0])
    duration_s = cost.step_ms(chunks, num_decodes, 100 * num_decodes) / 1e3 * (1 + contention * others)
    load = StepLoad(num_prefill, num_prefill**2 / 2, num_decodes, 100 * num_decodes)
    return EngineReport(timing=StepTiming(1, 0, 1, 1, 1, load, duration_s, others))


def test_the_cost_of_various_steps_is_found_and_follows_the_machine() -> None:
    clock, chance = ManualClock(), random.Random(3)
    meter = CostMeter(clock, must_decode=True)
    meter.on_report(EngineReport())
    for _ in range(200):
        meter.on_report(report(chance, COST))
    assert meter.cost() is None, "not asked for long enough"
    assert meter.metrics() == {}
    clock.advance(5.0)
    first = meter.cost()
    assert first is not None
    assert abs(first.prefill_token_ms - COST.prefill_token_ms) < 1e-3
    assert meter.metrics()["step_cost_base_ms"] == first.base_ms
    assert abs(meter.metrics()["step_cost_mean_prefill_token_ms"] - COST.prefill_token_ms) < 1e-3
    for _ in range(5000):
        meter.on_report(report(chance, StepCost(8.0, 0.2, 0.0, 1.0, 0.002)))
    assert meter.cost() is first
    clock.advance(5.0)
    second = meter.cost()
    assert second is not None
    assert abs(second.prefill_token_ms - 0.2) < 1e-3, "old steps are forgotten"


def test_what_other_workers_add_is_told_apart_from_the_cost() -> None:
    clock, chance = ManualClock(), random.Random(5)
    meter = CostMeter(clock, must_decode=True)
    for _ in range(1000):
        meter.on_report(report(chance, COST, contention=0.6))
    clock.advance(5.0)
    assert meter.cost() is not None
    assert abs(meter.metrics()["step_cost_contention"] - 0.6) < 0.01
    assert abs(meter.metrics()["step_cost_mean_prefill_token_ms"] - COST.prefill_token_ms) < 0.01


def test_steps_that_are_all_alike_tell_nothing() -> None:
    clock = ManualClock()
    meter = CostMeter(clock, must_decode=True)
    for _ in range(500):
        meter.on_report(EngineReport(timing=StepTiming(1, 0, 1, 1, 1, StepLoad(0, 0.0, 1, 50), 0.01)))
    clock.advance(5.0)
    assert meter.cost() is None
