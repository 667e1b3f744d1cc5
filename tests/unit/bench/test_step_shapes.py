"""A machine whose steps cost what a model says is profiled as that model."""

from dataclasses import astuple
from pathlib import Path

import pytest

from weir.bench.profile import try_cost_of
from weir.bench.step_shapes import shapes, time_grid
from weir.core.cost import PromptChunk, StepCost
from weir.core.cost_fit import fit_cost
from weir.engine.plan import StepPlan, StepResult
from weir.sim.profile import CostProfile, load_profile, save_profile

COST = StepCost(3.0, 0.5, 1e-3, 1.5, 2e-3)


class ModelledMachine:
    """Its clock moves only while it runs a step."""

    def __init__(self) -> None:
        self.time_s = 100.0
        self.plans: list[StepPlan] = []

    def now_s(self) -> float:
        return self.time_s

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        prompts = [PromptChunk(len(chunk.token_ids), chunk.start) for chunk in plan.chunks if len(chunk.token_ids) > 1]
        decodes = [chunk for chunk in plan.chunks if len(chunk.token_ids) == 1]
        self.time_s += COST.step_ms(prompts, len(decodes), sum(chunk.end for chunk in decodes)) / 1e3
        return StepResult({})


def test_the_fit_to_the_grid_is_the_machines_cost() -> None:
    machine = ModelledMachine()
    grid = shapes(max_context_tokens=2048, max_num_seqs=32, max_chunk_tokens=512)
    samples = list(time_grid(grid, machine, vocab_size=50, rounds=2, now_s=machine.now_s))
    assert len(samples) == 2 * len(grid)
    assert len(machine.plans) == 3 * len(grid), "one round is to warm up"
    assert astuple(fit_cost(samples).cost) == pytest.approx(astuple(COST), rel=1e-6)


def test_sequences_of_a_step_have_pages_of_their_own_within_the_arena() -> None:
    for shape in shapes(max_context_tokens=2048, max_num_seqs=8, max_chunk_tokens=256):
        plan = shape.plan(vocab_size=50)
        pages = [page_id for chunk in plan.chunks for page_id in chunk.block_table]
        assert sorted(pages) == list(range(shape.num_pages))
        assert len({chunk.slot for chunk in plan.chunks}) == len(plan.chunks)
        assert max(chunk.end for chunk in plan.chunks) <= 2048


@pytest.mark.parametrize("max_context_tokens", [100, 300])
def test_a_short_context_has_a_shorter_grid(max_context_tokens: int) -> None:
    grid = shapes(max_context_tokens, max_num_seqs=2, max_chunk_tokens=64)
    assert grid
    assert all(chunk.end <= max_context_tokens for shape in grid for chunk in shape.plan(50).chunks)


def test_what_a_worker_tells_is_read_back_and_written_as_a_profile(tmp_path: Path) -> None:
    metrics = {f"step_cost_{name}": value for name, value in zip(COST.__slots__, astuple(COST), strict=True)}
    assert try_cost_of(metrics) == COST
    assert try_cost_of({}) is None
    path = tmp_path / "measured.yaml"
    save_profile(CostProfile("measured", COST, num_pages=10, kv_bytes_per_token=4), path, "by a test")
    assert load_profile(path).step == COST
