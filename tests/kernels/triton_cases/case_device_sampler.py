"""Every way of sampling on the device, beside its definition in plain Python and beside the CPU's sampler."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.kernels.triton_cases.support import DEVICE, poisoned
from tests.unit.model.reference_sampler import adjusted_logits, kept_tokens, log_softmax

from weir.core.errors import InternalError
from weir.core.sampling import SamplingParams
from weir.engine.plan import SampleSpec, ScoreSpec, StepResult, TokenHistory
from weir.model.rows import SampledRow, ScoredRows
from weir.model.triton.batch import TritonLimits
from weir.model.triton.sampling import DeviceSampler, PendingSamples
from weir.ops.gpu.sampling import philox_uniforms

VOCAB_SIZE = 777
LIMITS = TritonLimits(max_rows=64, max_sequences=40, max_context_tokens=256)
PROMPT, OUTPUT = (5, 9, 9, 700, 12), (700, 31, 31, 31, 8)
WARM = SamplingParams(temperature=0.9, seed=11)
KINDS = {
    "greedy": replace(WARM, temperature=0.0),
    "temperature": WARM,
    "seed": replace(WARM, seed=2**63 + 5),
    "top_k": replace(WARM, top_k=7),
    "top_k of all": replace(WARM, top_k=VOCAB_SIZE),
    "top_p": replace(WARM, top_p=0.8),
    "nearly no top_p": replace(WARM, top_p=1e-9),
    "min_p": replace(WARM, min_p=0.05),
    "three filters": replace(WARM, top_k=60, top_p=0.9, min_p=0.03),
    "flat, three filters": replace(WARM, temperature=3.0, top_k=300, top_p=0.97, min_p=0.01),
    "repetition_penalty": replace(WARM, repetition_penalty=1.3),
    "presence_penalty": replace(WARM, presence_penalty=0.7),
    "frequency_penalty": replace(WARM, frequency_penalty=-0.4),
    "logit_bias": replace(WARM, logit_bias=((3, 6.5), (700, -4.0), (776, 5.5))),
    "logprobs": replace(WARM, logprobs=0),
    "greedy with penalties": replace(WARM, temperature=0.0, repetition_penalty=1.5, logprobs=3),
    "everything": replace(
        WARM, top_k=50, top_p=0.8, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2,
        logit_bias=((31, 3.0), (400, 4.0)), logprobs=5,
    ),
}  # fmt: skip


def history_of(prompt: Sequence[int] = PROMPT, output: Sequence[int] = OUTPUT) -> TokenHistory:
    return TokenHistory(np.array([*prompt, *output], np.int32), len(prompt))


def spec_of(params: SamplingParams, output_index: int, masked: tuple[int, ...] = ()) -> SampleSpec:
    return SampleSpec(params, output_index, masked, history_of() if params.has_penalties else None)


def rows_of(specs: Sequence[SampleSpec]) -> list[SampledRow]:
    """In slots that are not their numbers."""
    return [SampledRow(100 - number, number, spec) for number, spec in enumerate(specs)]


def logits_of(num_rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 4) -> torch.Tensor:
    """A view of wider rows: what lies behind them is NaN."""
    torch.manual_seed(seed)
    wide = poisoned(num_rows + 1, vocab_size + 70)
    wide[:num_rows, :vocab_size] = (3 * torch.randn(num_rows, vocab_size)).to(DEVICE)
    return wide[:num_rows, :vocab_size]


def sampler(vocab_size: int = VOCAB_SIZE) -> DeviceSampler:
    found = DeviceSampler(LIMITS, vocab_size, DEVICE)
    found._token_ids.fill_(-9)
    found._scratch.block_max.fill_(float("nan"))
    found._scratch.block_sum.fill_(float("nan"))
    return found


def by_definition(logits: torch.Tensor, spec: SampleSpec) -> int:
    """Tokens without a filter are drawn in the order of ids, others in that of probability."""
    params = spec.params
    values = adjusted_logits(
        logits.cpu().numpy(), params, *((PROMPT, OUTPUT) if spec.history is not None else ((), ()))
    )
    for token_id in spec.masked_token_ids:
        values[token_id] = -1e30
    kept = kept_tokens(values, params)
    is_filtered = 0 < params.top_k < len(values) or params.top_p < 1.0 or params.min_p > 0.0
    order = list(kept) if is_filtered else sorted(kept)
    uniform = philox_uniforms(np.array([params.seed], np.uint64), np.array([spec.output_index], np.uint64))[0]
    cumulative = np.cumsum([kept[token_id] for token_id in order])
    return order[int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))]


def sampled(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> StepResult:
    return waited_for(sampler(logits.shape[1]).launch(logits.clone(), rows_of(specs)))


def waited_for(samples: PendingSamples) -> StepResult:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return samples.result()


ALL_SPECS = [
    *(spec_of(params, index) for params in KINDS.values() for index in (0, 3)),
    spec_of(WARM, 1, masked=(2, 776)),
    spec_of(KINDS["everything"], 1, masked=(31, 0)),
]


@pytest.fixture(scope="module")
def together() -> tuple[torch.Tensor, StepResult]:
    logits = logits_of(len(ALL_SPECS))
    logits[-2, 2] = 40.0  # masked: it would be sampled otherwise
    return logits, sampled(logits, ALL_SPECS)


def test_every_parameter_is_tried_here() -> None:
    default = SamplingParams()
    for field in fields(SamplingParams):
        is_tried = any(getattr(params, field.name) != getattr(default, field.name) for params in KINDS.values())
        # nothing is drawn by the one, and by the other what its mask says, which is tried below
        assert is_tried or field.name in ("prompt_logprobs", "grammar"), field.name


class Allowed(NamedTuple):
    """The mask of a grammar."""

    token_ids: tuple[int, ...]

    def allowed(self) -> npt.NDArray[np.uint32]:
        bits = np.zeros(-(-VOCAB_SIZE // 32) * 32, np.uint8)
        bits[list(self.token_ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)


def test_a_row_with_a_grammar_is_drawn_from_what_it_allows_beside_rows_without_one() -> None:
    allowed = (3, 31, 32, 33, 500, VOCAB_SIZE - 1)
    everything = replace(KINDS["everything"], logprobs=2)
    grammars = [
        SampleSpec(replace(params, seed=seed), seed, masked, history_of(), Allowed(allowed))
        for params in (WARM, SamplingParams(temperature=0.0), everything)
        for seed, masked in ((1, ()), (2, (500,)), (3, allowed))
    ]
    specs = [spec_of(WARM, 0), *grammars, spec_of(WARM, 1)]
    logits = logits_of(len(specs))
    result = sampled(logits, specs)
    for number, spec in enumerate(specs):
        kept = (
            set(range(VOCAB_SIZE)) if spec.mask is None else set(allowed) - set(spec.masked_token_ids) or set(allowed)
        )
        ruled_out = tuple(sorted(set(range(VOCAB_SIZE)) - kept))
        assert result.token_ids[100 - number] == by_definition(
            logits[number], spec._replace(masked_token_ids=ruled_out)
        )


def test_rows_of_every_kind_in_one_batch_are_sampled_as_the_definition_says(
    together: tuple[torch.Tensor, StepResult],
) -> None:
    logits, result = together
    expected = {row.slot: by_definition(logits[row.row], row.spec) for row in rows_of(ALL_SPECS)}
    assert result.token_ids == expected
    assert len(set(expected.values())) > 8


def test_rows_of_every_kind_are_sampled_as_on_the_cpu(together: tuple[torch.Tensor, StepResult]) -> None:
    pytest.importorskip("numba", reason="the CPU's sampler is compiled by numba")
    from weir.model.sampler import sample_step, scan_of  # noqa: PLC0415

    logits, result = together
    expected = sample_step(scan_of(np.ascontiguousarray(logits.cpu().numpy())), rows_of(ALL_SPECS))
    assert result.token_ids == expected.token_ids
    assert result.logprobs.keys() == expected.logprobs.keys()
    for slot, found in result.logprobs.items():
        wanted = expected.logprobs[slot]
        assert (found.token_id, found.rank) == (wanted.token_id, wanted.rank)
        assert [token_id for token_id, _ in found.top] == [token_id for token_id, _ in wanted.top]
        assert [found.logprob, *(p for _, p in found.top)] == pytest.approx(
            [wanted.logprob, *(p for _, p in wanted.top)], abs=1e-5
        )


def test_a_row_is_the_same_to_the_bit_whatever_is_beside_it(together: tuple[torch.Tensor, StepResult]) -> None:
    logits, result = together
    for number in range(1, len(ALL_SPECS), 2):
        alone = sampled(logits[number : number + 1], ALL_SPECS[number : number + 1])
        slot = 100 - number
        assert alone.token_ids[100] == result.token_ids[slot], ALL_SPECS[number].params
        assert alone.logprobs.get(100) == result.logprobs.get(slot), ALL_SPECS[number].params


def test_log_probabilities_are_those_of_the_models_own_logits(together: tuple[torch.Tensor, StepResult]) -> None:
    logits, result = together
    for number, spec in enumerate(ALL_SPECS):
        if spec.params.logprobs is None:
            continue
        found, expected = result.logprobs[100 - number], log_softmax(logits[number].cpu().numpy())
        order = np.argsort(-np.array(expected), kind="stable").tolist()
        assert found.logprob == pytest.approx(expected[found.token_id], abs=1e-5)
        assert found.rank == 1 + order.index(found.token_id)
        assert [token_id for token_id, _ in found.top] == order[: spec.params.logprobs]


def test_of_equal_logits_the_lower_ids_are_kept_and_drawn() -> None:
    logits = torch.round(logits_of(1, 150) / 2).expand(24, 150).clone()
    kinds = [replace(WARM, top_k=9), replace(WARM, top_p=0.6), replace(WARM, min_p=0.3, logprobs=6)]
    specs = [spec_of(replace(kinds[index % 3], temperature=1.7), index) for index in range(24)]
    result = sampled(logits, specs)
    assert result.token_ids == {row.slot: by_definition(logits[row.row], row.spec) for row in rows_of(specs)}
    order = sorted(range(150), key=lambda token: (-float(logits[0, token]), token))
    assert [token_id for token_id, _ in result.logprobs[98].top] == order[:6]


@pytest.mark.parametrize("vocab_size", [1, 2, 2047, 2049, 5000])
def test_vocabularies_of_any_size(vocab_size: int) -> None:
    logits = logits_of(2, vocab_size)
    specs = [spec_of(replace(WARM, top_k=3, top_p=0.9), 0), spec_of(replace(WARM, top_p=0.5, logprobs=3), 1)]
    result = sampled(logits, specs)
    assert result.token_ids == {row.slot: by_definition(logits[row.row], row.spec) for row in rows_of(specs)}
    assert len(result.logprobs[99].top) == min(3, vocab_size)


def test_logits_far_apart_or_all_equal_are_searched_to_the_end() -> None:
    logits = torch.zeros(3, 600, device=DEVICE)
    logits[1, 1:] = -3e38
    logits[2] = torch.linspace(-1e-30, 1e-30, 600)
    specs = [spec_of(replace(WARM, top_k=5), 2)] * 3
    found = sampled(logits, specs).token_ids
    assert found == {row.slot: by_definition(logits[row.row], row.spec) for row in rows_of(specs)}
    assert found[99] == 0


def test_a_long_history_is_counted_and_the_counts_are_cleared() -> None:
    rng = np.random.default_rng(8)
    tokens = np.minimum(rng.zipf(1.3, 3000), VOCAB_SIZE - 1)
    prompt, output = tokens[:1300].tolist(), tokens[1300:].tolist()
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.01, logprobs=1
    )
    spec = SampleSpec(params, 0, (), history_of(prompt, output))
    logits, device_sampler = logits_of(3), sampler()
    changed = logits.clone()
    device_sampler.launch(changed, rows_of([spec_of(WARM, 0), spec, spec_of(WARM, 0)]))
    expected = np.array(adjusted_logits(logits[1].cpu().numpy(), params, prompt, output), np.float32)
    np.testing.assert_array_equal(changed[1].cpu().numpy(), expected)
    assert torch.equal(changed[[0, 2]], logits[[0, 2]])
    assert not bool(device_sampler._counts.any())


def test_histories_larger_than_the_first_upload_are_sent_too() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=1.0)
    output = np.full(300_000, 5, np.int32)
    spec = SampleSpec(params, 0, (), TokenHistory(output, 10))
    logits = logits_of(1)
    logits[0, 5] = float(logits[0].max()) + 0.5
    assert sampled(logits, [spec]).token_ids[100] != 5


def test_where_every_token_is_masked_one_is_sampled_still() -> None:
    specs = [spec_of(replace(WARM, top_p=0.5), 0, masked=tuple(range(VOCAB_SIZE)))]
    assert 0 <= sampled(logits_of(1), specs).token_ids[100] < VOCAB_SIZE


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_no_number_spoils_the_step_even_where_it_is_masked(bad: float) -> None:
    logits = logits_of(3)
    logits[1, 8] = bad
    specs = [spec_of(WARM, 0), spec_of(replace(WARM, top_k=4, logprobs=1), 0, masked=(8,)), spec_of(WARM, 0)]
    with pytest.raises(InternalError, match=r"NaN or infinite logits in 1 of 3 rows: \[1\]"):
        sampled(logits, specs)


def test_penalties_without_a_history_are_a_defect() -> None:
    with pytest.raises(InternalError, match="without the tokens before it"):
        sampled(logits_of(1), [SampleSpec(replace(WARM, presence_penalty=1.0), 0)])


@pytest.mark.long
def test_a_prompt_is_scored_in_parts() -> None:
    logits, next_token_ids = logits_of(130, 50), tuple(range(40)) * 3
    scored = ScoredRows(2, 7, ScoreSpec(next_token_ids, 2))
    asked: list[range] = []

    def part(rows: range) -> torch.Tensor:
        asked.append(rows)
        return logits[rows.start : rows.stop]

    found = sampler(50).prompt_logprobs(scored, part)
    assert asked == [range(7, 71), range(71, 127)]
    assert [score.token_id for score in found] == list(next_token_ids)
    for place, score in enumerate(found):
        expected = log_softmax(logits[7 + place].cpu().numpy())
        assert score.logprob == pytest.approx(expected[score.token_id], abs=1e-5)
        assert score.rank == 1 + sum(each > expected[score.token_id] for each in expected)
        assert len(score.top) == 2
        assert score.top[0][1] == pytest.approx(max(expected), abs=1e-5)
