"""What the parts of `make gpu` measure, as far as it can be told without a GPU."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is installed on Linux only")

import torch

from benchmarks.gpu.case_loop import CaseLoop, CaseSkipped, Progress, Selection, is_sticky
from benchmarks.gpu.cuda_pair import inter_token_records
from benchmarks.gpu.kernel_times import name_of
from benchmarks.gpu.kernels import makers_of_cases
from benchmarks.gpu.pair import PairResult
from benchmarks.gpu.products import product_shapes, time_products
from benchmarks.gpu.sanitizer import check, try_sanitizer
from benchmarks.gpu.step import decode_work, part_of, prefill_work, time_step
from benchmarks.gpu.timer import Ceilings, Timing
from weir.engine.plan import StepPlan, StepResult
from weir.kv.geometry import num_pages_for
from weir.model.architecture import tensor_shapes
from weir.model.files.dummy import shape_named

CEILINGS = Ceilings(copy_bytes_a_second=1e12, read_bytes_a_second=9e11, matmul_flops_a_second=1e14)
LLAMA_8B = shape_named("llama-3.1-8b")


class CountingRunner:
    """A runner that keeps its plans."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return StepResult({})


class CalledOnce:
    def time(self, call: Callable[[], object]) -> Timing:
        call()
        return Timing(100.0, 90.0, 120.0)


def test_the_floor_of_a_decode_is_the_weights_and_what_its_rows_read() -> None:
    one, many = (decode_work(LLAMA_8B, num_rows, num_pages=12_000) for num_rows in (1, 32))
    assert one.num_bytes == pytest.approx(15.0e9 + 1024 * 131_072, rel=0.01)
    assert many.num_bytes - one.num_bytes == 31 * 1024 * 131_072
    assert many.num_flops == 32 * one.num_flops
    assert [chunk.start for chunk in many.plan.chunks] == [1024] * 32
    assert all(len(chunk.block_table) == num_pages_for(1025) for chunk in many.plan.chunks)
    assert {page for chunk in many.plan.chunks for page in chunk.block_table} <= set(range(12_000))


def test_sequences_share_pages_where_the_memory_is_small() -> None:
    work = decode_work(LLAMA_8B, 128, num_pages=300)
    assert max(page for chunk in work.plan.chunks for page in chunk.block_table) == 299


def test_a_step_is_timed_after_its_warm_up() -> None:
    runner = CountingRunner()
    (record,) = time_step(runner, prefill_work(LLAMA_8B, 512), CEILINGS)
    assert len(runner.plans) == 23
    assert record["floor_ms"] == pytest.approx(1000 * 2 * 512 * 7.5e9 / 1e14, rel=0.01)
    assert record["times_floor"] == pytest.approx(record["median_ms"] / record["floor_ms"])


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.2-1b", "tiny"])
def test_the_products_are_all_the_matrices_of_a_step(name: str) -> None:
    config = shape_named(name)
    shapes = product_shapes(config)
    layer = sum(math.prod(shape) for what, shape in shapes.items() if what != "head")
    matrices = [shape for shape in tensor_shapes(config).values() if len(shape) == 2]
    embeddings = 1 if config.tie_word_embeddings else 2
    expected = sum(map(math.prod, matrices)) - (embeddings - 1) * config.vocab_size * config.hidden_size
    assert config.num_layers * layer + math.prod(shapes["head"]) == expected


def test_each_product_and_their_sum_are_recorded() -> None:
    config = shape_named("tiny")
    *products, whole = time_products(config, 3, CalledOnce(), CEILINGS, torch.device("cpu"))
    assert [record["rows"] for record in products] == [3] * 5
    assert whole["products_of_a_step_ms"] == pytest.approx((4 * config.num_layers + 1) * 0.1)


def test_cases_of_kernels_have_names_of_their_own() -> None:
    names = [name_of(make) for make in makers_of_cases(torch.device("cpu"), 90)]
    assert len(set(names)) == len(names) >= 20
    assert names[0] == "decode 8B 1 x 4096"


def test_inter_token_times_are_told_apart_by_whether_prompts_were_computed_then() -> None:
    # the second request's prompt is done after 2.0 s; a request's first gap is its hand-off
    result = PairResult({0: [], 1: []}, {0: [0.5, 1.0, 1.5, 2.0, 2.1], 1: [2.0, 2.6, 2.7]})
    assert result.inter_token_s(while_prefilling=True) == pytest.approx([0.5, 0.5])
    assert result.inter_token_s(while_prefilling=False) == pytest.approx([0.1, 0.1])
    during, after = inter_token_records(result)
    assert (during["median_ms"], after["median_ms"]) == (pytest.approx(500.0), pytest.approx(100.0))


def test_a_model_shape_is_of_its_part() -> None:
    assert [part_of(name) for name in ("llama-3.1-8b", "llama-3.2-1b")] == ["step-8B", "step-1B"]


def test_the_sanitizer_is_asked_for_one_kernel_and_its_report_is_read(tmp_path: Path) -> None:
    fake = tmp_path / "compute-sanitizer"
    fake.write_text("#!/bin/sh\necho \"$@\"\necho '========= ERROR SUMMARY: 2 errors'\nexit 86\n")
    fake.chmod(0o755)
    (record,) = check(str(fake), "memcheck", "paged_decode")
    assert record == {"verdict": "failed", "summary": "ERROR SUMMARY: 2 errors"}


def test_a_machine_without_the_sanitizer_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/compute-sanitizer").write_text("")
    assert try_sanitizer() == str(tmp_path / "bin/compute-sanitizer")


def test_errors_after_which_nothing_works_are_told_from_others() -> None:
    assert is_sticky("CUDA error: an illegal memory access was encountered")
    assert is_sticky("cuCtxSynchronize: unspecified launch failure (719)")
    assert not is_sticky("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert not is_sticky("CUDA error: invalid argument")


def test_cases_that_have_begun_are_not_begun_again_and_one_can_be_asked_for(tmp_path: Path) -> None:
    progress, ran = tmp_path / "progress", []

    def case(name: str) -> list[dict[str, object]]:
        ran.append(name)
        if name == "lacking":
            raise CaseSkipped("nothing here")
        return []

    def run_all(selection: Selection) -> CaseLoop:
        loop = CaseLoop("part", None, selection)
        for name in ("first", "lacking", "last"):
            loop.run(name, partial(case, name))
        return loop

    Selection(progress).note("begin", "first")
    assert Progress.read(progress).in_progress == "first"
    loop = run_all(Selection(progress))
    assert (ran, loop.exit_code) == (["lacking", "last"], 0)
    assert Progress.read(progress).ended == ("lacking", "last")
    run_all(Selection(progress, only="first"))
    assert ran == ["lacking", "last", "first"]
