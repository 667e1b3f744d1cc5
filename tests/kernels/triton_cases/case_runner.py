"""A whole model through the Triton path: same tokens as the fp32 path on the CPU, and as many launches as it needs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from tests.kernels.triton_cases.support import DEVICE, IS_INTERPRETED
from tests.unit.model.device_model import empty_pages, weights_on
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from weir.core.errors import InternalError
from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, ModelRunner, SampleSpec, ScoreSpec, StepPlan, StepResult, TokenHistory
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.model.architecture import ModelConfig, SlidingWindow, mlp_norm_name, tensor_shapes
from weir.model.files.dummy import shape_named
from weir.model.torch.batch import build_batch
from weir.model.torch.decoder import Decoder
from weir.model.torch.paged_kv import PagedKv
from weir.model.torch.weights import LayerWeights, Weights, dummy_tensor_on
from weir.model.triton.batch import MAX_PADDED_PROMPTS, TritonLimits
from weir.model.triton.graphs import cuda_graph_capture
from weir.model.triton.runner import TritonRunner

ResultT = TypeVar("ResultT")
CPU = torch.device("cpu")
# The library's products round differently for other numbers of rows: numpy's a little, a GPU's by whole other kernels,
# whose sums the second layer makes larger.
ROW_COUNT_TOLERANCE = 1e-5 if IS_INTERPRETED else 2e-3
KERNEL_TYPE: Any = InterpretedFunction if IS_INTERPRETED else JITFunction
CONFIG = replace(shape_named("tiny"), max_context_tokens=256, query_key_value_bias=True, query_key_norm=True)
GEMMA = replace(
    CONFIG,
    window=SlidingWindow(21, (True, False), rope_theta=1e4),
    query_pre_attn_scalar=20.0,
    embedding_scale=1.5,
    activation="gelu_tanh",
    post_norms=True,
    offset_norms=True,
    attention_softcap=2.0,
    logit_softcap=20.0,
)
"""What the kernels do for it, and the library for none else."""
LIMITS = TritonLimits(max_rows=64, max_sequences=4, max_context_tokens=256)
NUM_PAGES = 24
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8, seed=77)
FILTERED = SamplingParams(temperature=0.9, top_k=20, top_p=0.8, seed=5, logprobs=2)


def random_weights(config: ModelConfig) -> Weights:
    """Larger than a model's: the logits of random weights lie close together otherwise, and any rounding decides."""
    tensors = {
        name: 4 * dummy_tensor_on(CPU, torch.float32, name, shape) for name, shape in tensor_shapes(config).items()
    }
    query_key_value_bias = 0.3 * torch.randn((config.num_heads + 2 * config.num_kv_heads) * config.head_dim)

    def layer(number: int) -> LayerWeights:
        own = {name.partition(f"layers.{number}.")[2]: tensor for name, tensor in tensors.items()}
        return LayerWeights(
            attention_norm=own["input_layernorm.weight"] / 4,
            query_key_value=torch.cat([own[f"self_attn.{part}_proj.weight"] for part in "qkv"]),
            query_key_value_bias=query_key_value_bias,
            attention_output=own["self_attn.o_proj.weight"],
            attention_output_bias=None,
            mlp_norm=own[f"{mlp_norm_name(config)}.weight"] / 4,
            gate_up=torch.cat([own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]]),
            down=own["mlp.down_proj.weight"],
            query_norm=1.5 + torch.rand(config.head_dim),
            key_norm=1.5 + torch.rand(config.head_dim),
            after_attention_norm=0.5 + torch.rand(config.hidden_size) if config.post_norms else None,
            after_mlp_norm=0.5 + torch.rand(config.hidden_size) if config.post_norms else None,
        )

    embedding = tensors["model.embed_tokens.weight"]
    layers = tuple(layer(number) for number in range(config.num_layers))
    return Weights(embedding, layers, tensors["model.norm.weight"] / 4, embedding)


class GreedyOnCpu:
    """The fp32 path without its sampler, which needs numba: the greatest logit."""

    def __init__(self, weights: Weights, config: ModelConfig = CONFIG) -> None:
        self._config = config
        self._decoder = Decoder(config, weights)
        self._kv = PagedKv(CONFIG.page_geometry, np.zeros((NUM_PAGES, CONFIG.page_geometry.page_bytes), np.uint8))

    def run(self, plan: StepPlan) -> StepResult:
        batch = build_batch(plan, self._kv, self._config)
        with torch.inference_mode():
            logits = self._decoder.logits(self._decoder.forward(batch, self._kv))
        return StepResult({sampled.slot: int(logits[sampled.row].argmax()) for sampled in batch.sampled})


class Conversation:
    """Sequences of one runner, stepped together: prompts in chunks, then one token each a step."""

    def __init__(self, runner: ModelRunner, prompts: Sequence[Sequence[int]]) -> None:
        self._runner = runner
        self._tokens = [list(prompt) for prompt in prompts]
        self._prompt_lengths = [len(prompt) for prompt in prompts]
        self._computed = [0] * len(prompts)
        order = np.random.default_rng(3).permutation(NUM_PAGES).tolist()
        count = NUM_PAGES // len(prompts)
        self._tables = [tuple(order[slot * count : (slot + 1) * count]) for slot in range(len(prompts))]

    def tokens_of(self, slot: int) -> list[int]:
        """Prompt and output."""
        return self._tokens[slot]

    def step(self, params: Sequence[SamplingParams], lengths: Sequence[int]) -> dict[int, int]:
        """Computes `lengths[slot]` more tokens of each sequence (0: none), and samples where all are computed."""
        chunks = []
        for slot, length in enumerate(lengths):
            tokens, start = self._tokens[slot], self._computed[slot]
            if not length:
                continue
            is_last = start + length == len(tokens)
            output_index = len(tokens) - self._prompt_lengths[slot]
            sample = SampleSpec(params[slot], output_index) if is_last else None
            chunk_ids = tuple(tokens[start : start + length])
            chunks.append(
                ChunkPlan(slot, start, chunk_ids, self._tables[slot][: num_pages_for(start + length)], sample)
            )
            self._computed[slot] += length
        sampled = dict(self._runner.run(StepPlan(0, tuple(chunks))).token_ids)
        for slot, token_id in sampled.items():
            self._tokens[slot].append(token_id)
        return sampled


PROMPTS = [[7 * i % 1024 for i in range(37)], [5], [(11 * i + 3) % 1024 for i in range(20)]]
# tokens of each sequence a step: chunked prompts, mixed steps, then decodes
SCHEDULE = [(20, 1, 0), (16, 1, 20), *[(1, 1, 1)] * 3]


def triton_runner(weights: Weights, dtype: torch.dtype = torch.float32, config: ModelConfig = CONFIG) -> TritonRunner:
    """Over pages that are NaN until they are written."""
    pages = empty_pages(config, NUM_PAGES, DEVICE, dtype).fill_(float("nan"))
    return TritonRunner(config, weights_on(weights, DEVICE, dtype), pages, LIMITS)


def torch_runner(weights: Weights) -> ModelRunner:
    pytest.importorskip("numba", reason="the CPU's sampler is compiled by numba")
    from weir.model.torch.runner import TorchRunner  # noqa: PLC0415

    return TorchRunner(CONFIG, weights, np.zeros((NUM_PAGES, CONFIG.page_geometry.page_bytes), np.uint8))


@pytest.fixture(scope="module")
def weights() -> Weights:
    torch.manual_seed(0)
    return random_weights(CONFIG)


@pytest.mark.long
def test_a_model_of_two_layers_samples_the_greedy_ids_of_the_cpu_path(weights: Weights) -> None:
    check_same_ids(triton_runner(weights), GreedyOnCpu(weights), [GREEDY] * 3)


def test_so_does_one_with_a_window_norms_behind_its_branches_and_gelu() -> None:
    torch.manual_seed(1)
    weights = random_weights(GEMMA)
    check_same_ids(triton_runner(weights, config=GEMMA), GreedyOnCpu(weights, GEMMA), [GREEDY] * 3)


def test_a_model_of_two_layers_samples_the_ids_of_the_cpu_path(weights: Weights) -> None:
    check_same_ids(triton_runner(weights), torch_runner(weights), [WARM, GREEDY, FILTERED])


def check_same_ids(runner: ModelRunner, reference: ModelRunner, params: Sequence[SamplingParams]) -> None:
    expected, found = Conversation(reference, PROMPTS), Conversation(runner, PROMPTS)
    sampled: set[int] = set()
    for lengths in SCHEDULE:
        token_ids = found.step(params, lengths)
        assert token_ids == expected.step(params, lengths)
        sampled |= set(token_ids.values())
    assert len(sampled) > 5, "a model that always says the same would agree with anything"


def test_the_last_token_of_a_cut_prompt_is_prefilled_as_its_others_are(weights: Weights, launches: list[str]) -> None:
    conversation = Conversation(triton_runner(weights), PROMPTS[:1])
    conversation.step([GREEDY], (36,))
    conversation.step([GREEDY], (1,))
    assert launches.count("paged_prefill_kernel") == 4
    assert "paged_decode_kernel" not in launches


def test_a_prompt_cut_anywhere_gives_the_same_keys_and_values(weights: Weights) -> None:
    prompt = PROMPTS[0]
    table = tuple(range(3))

    def pages_after(cuts: Sequence[int]) -> torch.Tensor:
        pages = empty_pages(CONFIG, 3, DEVICE, torch.float32)
        runner = TritonRunner(CONFIG, weights_on(weights, DEVICE, torch.float32), pages, LIMITS)
        for start, end in pairwise(cuts):
            runner.run(StepPlan(0, (ChunkPlan(0, start, tuple(prompt[start:end]), table[: num_pages_for(end)], None),)))
        return pages

    whole, cut = pages_after([0, 37]), pages_after([0, 1, 17, 18, 37])
    torch.testing.assert_close(whole, cut, atol=ROW_COUNT_TOLERANCE, rtol=ROW_COUNT_TOLERANCE)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are launched, in order."""
    names: list[str] = []
    launched = KERNEL_TYPE.run

    def counted(kernel: Any, *args: object, **kwargs: object) -> object:
        names.append(kernel.fn.__name__)
        return launched(kernel, *args, **kwargs)

    monkeypatch.setattr(KERNEL_TYPE, "run", counted)
    return names


def test_a_decode_step_launches_five_kernels_a_layer_and_three_more(weights: Weights, launches: list[str]) -> None:
    conversation = Conversation(triton_runner(weights), PROMPTS)
    conversation.step([GREEDY] * 3, (37, 1, 20))
    launches.clear()
    conversation.step([GREEDY] * 3, (1, 1, 1))
    layer = ["rms_norm_kernel", "rotary_kv_write_kernel", "paged_decode_kernel", "rms_norm_kernel", "gated_kernel"]
    assert launches == [*layer * 2, "rms_norm_kernel", "block_weights_kernel", "sample_token_kernel"]


def test_prompts_are_scored_as_on_the_cpu_path(weights: Weights) -> None:
    prompt = tuple(PROMPTS[2])
    table = tuple(range(num_pages_for(len(prompt))))
    chunk = ChunkPlan(4, 0, prompt, table, SampleSpec(GREEDY, 0), ScoreSpec(prompt[1:], num_top=2))
    plan = StepPlan(0, (chunk,))
    expected, found = torch_runner(weights).run(plan), triton_runner(weights).run(plan)
    assert found.token_ids == expected.token_ids
    assert [score.rank for score in found.prompt_logprobs[4]] == [s.rank for s in expected.prompt_logprobs[4]]
    found_logprobs = [score.logprob for score in found.prompt_logprobs[4]]
    assert found_logprobs == pytest.approx([score.logprob for score in expected.prompt_logprobs[4]], abs=1e-3)


def test_logits_that_are_no_numbers_are_an_error(weights: Weights) -> None:
    broken = replace(weights, final_norm=torch.full_like(weights.final_norm, float("nan")))
    chunk = ChunkPlan(0, 0, (1, 2), (0,), SampleSpec(GREEDY, 0))
    with pytest.raises(InternalError, match="NaN or infinite logits in 1 of 1 rows"):
        triton_runner(broken).run(StepPlan(0, (chunk,)))


def test_a_step_larger_than_the_buffers_is_refused(weights: Weights) -> None:
    table = tuple(range(num_pages_for(65)))
    with pytest.raises(InternalError, match="65 tokens of 1 sequences, the runner has room for 64 of 4"):
        triton_runner(weights).run(StepPlan(0, (ChunkPlan(0, 0, (1,) * 65, table, None),)))


def test_pages_of_another_geometry_are_refused(weights: Weights) -> None:
    pages = torch.zeros(4, CONFIG.num_layers, 2, 1, PAGE_TOKENS, CONFIG.head_dim, device=DEVICE)
    with pytest.raises(ValueError, match=r"pages are torch.float32 \[4, 2, 2, 1, 16, 32\]"):
        TritonRunner(CONFIG, weights_on(weights, DEVICE, torch.float32), pages, LIMITS)


def run_again(step: Callable[[], ResultT]) -> Callable[[], ResultT]:
    """In place of a CUDA graph, which no interpreter captures: the same step, on the same memory."""
    step()
    return step


@pytest.mark.long
def test_replayed_decodes_sample_what_steps_of_their_own_sample(weights: Weights) -> None:
    runner = triton_runner(weights)
    runner.capture_graphs(run_again if IS_INTERPRETED else cuda_graph_capture())
    expected, found = Conversation(triton_runner(weights), PROMPTS), Conversation(runner, PROMPTS)
    for lengths in [*SCHEDULE, (1, 0, 1), (0, 1, 0)]:
        assert found.step([GREEDY, WARM, FILTERED], lengths) == expected.step([GREEDY, WARM, FILTERED], lengths)


@pytest.mark.long
def test_more_prompts_than_a_graph_holds_are_launched(weights: Weights) -> None:
    def run(*, has_graphs: bool) -> StepResult:
        pages = empty_pages(CONFIG, MAX_PADDED_PROMPTS + 2, DEVICE, torch.float32)
        limits = TritonLimits(max_rows=64, max_sequences=len(pages), max_context_tokens=256)
        runner = TritonRunner(CONFIG, weights_on(weights, DEVICE, torch.float32), pages, limits)
        if has_graphs:
            runner.capture_graphs(run_again if IS_INTERPRETED else cuda_graph_capture())
        chunks = [ChunkPlan(slot, 0, (slot, 3), (slot,), SampleSpec(GREEDY, 0)) for slot in range(len(pages))]
        return runner.run(StepPlan(0, tuple(chunks)))

    assert run(has_graphs=True).token_ids == run(has_graphs=False).token_ids


def test_no_parameter_of_a_row_keeps_a_batch_from_its_graph(weights: Weights, launches: list[str]) -> None:
    runner = triton_runner(weights)
    num_captured = 0

    def capture(step: Callable[[], ResultT]) -> Callable[[], ResultT]:
        nonlocal num_captured
        num_captured += 1
        result = step()
        return lambda: result

    runner.capture_graphs(capture)
    assert num_captured > 2
    launches.clear()
    everything = replace(FILTERED, logit_bias=((3, 1.0),), presence_penalty=0.5, min_p=0.01)
    spec = SampleSpec(everything, 2, (7,), TokenHistory(np.arange(40, dtype=np.int32), 30))
    result = runner.run(StepPlan(0, (ChunkPlan(3, 39, (1,), (4, 5, 6), spec),)))
    assert result.logprobs.keys() == {3}
    drawn = ["block_weights_kernel", "sample_token_kernel", "sample_filtered_kernel"]
    assert launches == ["adjust_logits_kernel", *drawn, "token_logprobs_kernel"]


def test_capturing_writes_to_no_page(weights: Weights) -> None:
    pages = empty_pages(CONFIG, NUM_PAGES, DEVICE, torch.float32).fill_(7.0)
    runner = TritonRunner(CONFIG, weights_on(weights, DEVICE, torch.float32), pages, LIMITS)
    runner.capture_graphs(run_again if IS_INTERPRETED else cuda_graph_capture())
    assert bool((pages == 7.0).all())
