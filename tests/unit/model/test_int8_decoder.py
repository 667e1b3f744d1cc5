"""The int8 path computes the model: close to fp32 in value, and exactly what the plan asks for."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from tests.unit.model.architectures import VARIANTS, save_variant
from tests.unit.model.gguf_copy import write_gguf
from tests.unit.model.int8 import Int8Probe
from tests.unit.model.tiny import LogitsProbe, TinyLlama, chunk, poisoned_pages, prompt_ids, save_tiny_llama

from weir.core.errors import InternalError
from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, SampleSpec, ScoreSpec, StepPlan
from weir.model.cpu.core_share import FixedShare
from weir.model.files.source import ModelSource, resolve_model
from weir.model.load import load_model

pytestmark = pytest.mark.timeout(600)  # whoever comes first compiles

TOLERANCE = 0.05
"""Of the logits' range. Rows of 8 bits in groups of 32 lose 0.3 % a product, keys and values 0.2 %; two layers and a
head add that up: 0.026 in the median of 100 prompts, 0.044 in the 95th percentile."""
WIDER_TOLERANCES = {"mistral-sliding-window": 0.12, "phi3-longrope": 0.12}
"""0.075 in the 95th percentile of both. With the window left out the error is 0.49 in the median; of the others that
have one, 0.13 to 0.32."""
TABLE = (9, 2, 31, 4, 17, 40, 8, 33, 50, 21, 5, 60, 12)


def relative_error(source: ModelSource, cache_dir: Path, ids: list[int]) -> float:
    plan = chunk(0, ids, 0, len(ids), TABLE)
    expected = LogitsProbe(source).run(plan)[0].numpy()
    found = Int8Probe(source, cache_dir).run(plan)[0]
    return float(np.abs(found - expected).max() / np.ptp(expected))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 70])
def test_the_logits_are_close_to_those_of_fp32(length: int, tiny: TinyLlama, tmp_path: Path) -> None:
    assert relative_error(tiny.source, tmp_path, prompt_ids(length, seed=length)) < TOLERANCE


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_1"])
def test_quantized_files_are_computed_with_the_values_that_they_hold(kind: str, tied: bool, tmp_path: Path) -> None:
    tiny = save_tiny_llama(tmp_path / "hf", tied=tied)
    write_gguf(tiny, tmp_path / "tiny.gguf", gguf.GGMLQuantizationType[kind])
    source = resolve_model(str(tmp_path / "tiny.gguf"))
    assert relative_error(source, tmp_path, prompt_ids(40, seed=3)) < TOLERANCE


@pytest.mark.parametrize(
    "name",
    [
        "qwen2",
        "qwen3",
        "qwen3-tied",
        "qwen3-attention-bias",
        "qwen3-large-epsilon",
        "mistral-sliding-window",
        "qwen3-sliding-window",
        "phi3-longrope",
        "gemma2",
        "gemma3",
        "gemma3-scaled",
    ],
)
def test_what_architectures_add_to_llama_is_computed_too(name: str, tmp_path: Path) -> None:
    variant = next(variant for variant in VARIANTS if variant.name == name)
    source = save_variant(tmp_path / "hf", replace(variant, changes=variant.changes | {"head_dim": 32})).source
    tolerance = WIDER_TOLERANCES.get(name, TOLERANCE)
    for length in (1, 70, 200):
        assert relative_error(source, tmp_path, prompt_ids(length, seed=2)) < tolerance


def test_a_step_writes_its_own_positions_and_nothing_else(tiny: TinyLlama, tmp_path: Path) -> None:
    probe = Int8Probe(tiny.source, tmp_path)
    probe.run(chunk(0, prompt_ids(30, seed=5), 0, 18, (7, 3)))
    config = probe.config
    shape = (64, config.num_layers, 2, config.num_kv_heads)
    written = (probe.pages.view(np.uint16) != 0xFFFF).reshape(*shape, -1)
    keys, values = written[:, :, 0], written[:, :, 1]
    expected = np.zeros((64, 16), dtype=bool)
    expected[7], expected[3, :2] = True, True
    by_token = keys.reshape(64, config.num_layers, config.num_kv_heads, config.head_dim, 16)
    assert (by_token == expected[:, None, None, None, :]).all()
    by_token = values.reshape(64, config.num_layers, config.num_kv_heads, 16, config.head_dim)
    assert (by_token == expected[:, None, None, :, None]).all()


def test_a_plan_that_makes_no_sense_is_refused_before_anything_is_written(tiny: TinyLlama, tmp_path: Path) -> None:
    probe = Int8Probe(tiny.source, tmp_path)
    good = ChunkPlan(1, 0, (1, 2, 3), (0,), None)
    with pytest.raises(InternalError, match=r"slot 4.*64 pages"):
        probe.run(good, ChunkPlan(4, 0, (1, 2), (64,), None))
    assert (probe.pages == 0xFF).all()


class BusyHost(FixedShare):
    has_worked = False

    def take_mean_others(self) -> float:
        assert self.has_worked, "asked before the step"
        return 0.75

    def end(self) -> None:
        self.has_worked = True


def test_a_result_says_how_many_other_workers_computed_beside_the_step(tiny: TinyLlama, tmp_path: Path) -> None:
    weights = load_model(tiny.source, "int8", BusyHost(1), tmp_path)
    runner = weights.runner_over(poisoned_pages(3, weights.page_geometry.page_bytes))
    assert runner.run(StepPlan(0, (ChunkPlan(0, 0, (1, 2, 3), (2,), None),))).mean_others == 0.75


def test_warming_up_touches_no_page(tiny: TinyLlama, tmp_path: Path) -> None:
    weights = load_model(tiny.source, "int8", FixedShare(1), tmp_path)
    pages = poisoned_pages(3, weights.page_geometry.page_bytes)
    weights.runner_over(pages).warm_up()
    assert (pages == 0xFF).all()


def test_pages_of_another_geometry_are_refused(tiny: TinyLlama, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected"):
        load_model(tiny.source, "int8", FixedShare(1), tmp_path).runner_over(poisoned_pages(3, 4096))


def test_the_runner_samples_and_scores_what_the_plan_asks_for(tiny: TinyLlama, tmp_path: Path) -> None:
    ids = prompt_ids(200, seed=8)
    weights = load_model(tiny.source, "int8", FixedShare(1), tmp_path)
    runner = weights.runner_over(poisoned_pages(64, weights.page_geometry.page_bytes))
    greedy = SampleSpec(SamplingParams(temperature=0.0, logprobs=1), 0)
    table = tuple(range(20, 40))
    scored = ChunkPlan(2, 0, tuple(ids), table, greedy, ScoreSpec(tuple(ids[1:]), 0))
    silent = ChunkPlan(5, 0, (1, 2, 3), (9,), None)
    result = runner.run(StepPlan(0, (silent, scored)))
    probe = Int8Probe(tiny.source, tmp_path)
    expected = probe.run(chunk(2, ids, 0, 200, table))[2]
    assert dict(result.token_ids) == {2: int(expected.argmax())}
    assert result.logprobs.keys() == {2}
    scores = result.prompt_logprobs[2]
    assert len(scores) == 199, "over both slices of the step"
    logits = np.stack([probe.run(chunk(0, ids, 0, length, table))[0] for length in (1, 2, 128, 129, 199)])
    logsumexp = np.log(np.exp(logits.astype(np.float64)).sum(axis=-1))
    for row, place in enumerate((0, 1, 127, 128, 198)):
        assert scores[place].logprob == pytest.approx(logits[row, ids[place + 1]] - logsumexp[row], abs=1e-4)


def test_an_empty_plan_samples_nothing(tiny: TinyLlama, tmp_path: Path) -> None:
    weights = load_model(tiny.source, "int8", FixedShare(1), tmp_path)
    runner = weights.runner_over(poisoned_pages(4, weights.page_geometry.page_bytes))
    assert dict(runner.run(StepPlan(2, ())).token_ids) == {}


SERVING = """
import sys
from collections import Counter
from pathlib import Path
import numpy as np
from numba.core import event
from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, SampleSpec, ScoreSpec, StepPlan, TokenHistory
from weir.model.cpu.core_share import FixedShare
from weir.model.load import load_model
from weir.model.files.source import resolve_model

weights = load_model(resolve_model(sys.argv[1]), "auto", FixedShare(2), Path(sys.argv[2]))
runner = weights.runner_over(np.zeros((64, weights.page_geometry.page_bytes), np.uint8))
runner.warm_up()

class Listener(event.Listener):
    compiled = []
    def on_start(self, found):
        self.compiled.append(found.data["dispatcher"].py_func.__qualname__)
    def on_end(self, found):
        pass

event.register("numba:compile", Listener())
history = TokenHistory(np.arange(5, dtype=np.int32), 3)
kinds = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=3),
    SamplingParams(top_k=5, top_p=0.9, min_p=0.05, seed=4, logprobs=3),
    SamplingParams(presence_penalty=0.5, repetition_penalty=1.2, logit_bias=((4, 2.0),), logprobs=0),
]
for num_decodes in (0, 1, 9):
    for num_tokens in (0, 2, 130):
        chunks = [
            ChunkPlan(n, 20 + n, (n,), (2 * n, 2 * n + 1), SampleSpec(kinds[n % 4], 1, (7,), history))
            for n in range(num_decodes)
        ]
        if num_tokens:
            ids = tuple(range(num_tokens))
            score = ScoreSpec(ids[1:], 2)
            chunks.append(ChunkPlan(40, 0, ids, tuple(range(30, 40)), SampleSpec(kinds[0], 0), score))
        runner.run(StepPlan(0, tuple(chunks)))
print(Listener.compiled, "torch" in sys.modules)
"""


@pytest.mark.long
def test_the_first_start_compiles_each_kernel_once_and_serving_none_and_it_imports_no_torch(
    tiny: TinyLlama, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SERVING, str(tiny.folder), str(tmp_path)]
    environment = {**os.environ, "WEIR_CACHE": str(tmp_path)}
    for _ in ("first start", "second"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False, env=environment)
        assert (done.stdout, done.stderr) == ("[] False\n", "")
    kernels = Counter(path.name.partition("-")[0] for path in tmp_path.glob("kernels/*/*/*.nbc"))
    parts = {
        "forward.linear_share",
        "paged_prefill.paged_prefill",
        "paged_decode.decode_blocks",
        "sampling.sample_token",
    }
    assert {"forward.forward", *parts} <= kernels.keys()
    # these are called with several types
    several = {"phases.wait_for_phase", "phases.take_chunk"}
    assert {name for name, num in kernels.items() if num > 1} <= several
