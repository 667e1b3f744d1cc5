import numpy as np
import pytest
import torch
from tests.kernels.triton_cases.support import DEVICE, ints, normal

from weir.core.sampling import SamplingParams
from weir.engine.plan import SampleSpec
from weir.ops import reference
from weir.ops.gpu.sampling import NOT_A_NUMBER, philox_uniforms, sample, sampling_scratch


def sampled(logits: torch.Tensor, temperatures: list[float], uniforms: list[float]) -> list[int]:
    scratch = sampling_scratch(logits.shape[0], logits.shape[1], DEVICE)
    for tensor in (scratch.block_max, scratch.block_token, scratch.block_sum):
        tensor.fill_(-7)
    token_ids = torch.full((logits.shape[0],), -9, dtype=torch.int32, device=DEVICE)
    wide_uniforms = torch.tensor(uniforms, dtype=torch.float64, device=DEVICE)
    sample(logits, torch.tensor(temperatures, device=DEVICE), wide_uniforms, token_ids, scratch)
    return [int(token_id) for token_id in token_ids.tolist()]


@pytest.mark.parametrize("vocab_size", [1, 63, 1000, 1024, 1025, 5000])
def test_greedy_takes_the_greatest_logit(vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    logits = normal(5, vocab_size)
    assert sampled(logits, [0.0] * 5, [0.5] * 5) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("places", [[3, 999, 2000], [1024, 1023], [4999, 1]])
def test_of_equal_logits_the_lowest_id_wins(places: list[int]) -> None:
    torch.manual_seed(1)
    logits = normal(1, 5000)
    logits[0, places] = 50.0
    assert sampled(logits, [0.0], [0.0]) == [min(places)]


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 3.0])
@pytest.mark.parametrize("vocab_size", [7, 1000, 5000])
def test_a_seed_gives_the_token_that_the_cpu_samples(vocab_size: int, temperature: float) -> None:
    pytest.importorskip("numba", reason="the CPU's sampler is compiled by numba")
    from weir.model.sampler import sample_tokens, scan_of, uniform  # noqa: PLC0415

    torch.manual_seed(vocab_size)
    logits = normal(24, vocab_size) * 3
    params = SamplingParams(temperature=temperature, seed=1234)
    uniforms = philox_uniforms(np.full(24, params.seed, np.uint64), np.arange(24, dtype=np.uint64)).tolist()
    assert uniforms == [uniform(params.seed, index) for index in range(24)]
    specs = [SampleSpec(params, index) for index in range(24)]
    expected = sample_tokens(scan_of(logits.cpu().numpy()), specs)
    temperatures = [temperature] * 24
    assert sampled(logits, temperatures, uniforms) == expected
    wide = torch.tensor(uniforms, dtype=torch.float64, device=DEVICE)
    assert expected == reference.sample(logits, torch.tensor(temperatures), wide).tolist()


def test_the_ends_of_the_distribution_are_tokens_with_weight() -> None:
    logits = torch.full((2, 3000), -1e30, device=DEVICE)
    logits[:, [5, 1100, 2200]] = 1.0
    assert sampled(logits, [1.0, 1.0], [0.0, 1.0 - 2**-53]) == [5, 2200]
    assert sampled(logits, [1.0, 1.0], [0.34, 1.0]) == [1100, 2200]


def test_rows_of_one_batch_are_sampled_each_its_own_way() -> None:
    torch.manual_seed(9)
    logits = normal(3, 2000)
    mixed = sampled(logits, [0.0, 1.0, 0.5], [0.1, 0.6, 0.9])
    alone = [sampled(logits[i : i + 1], [t], [u])[0] for i, t, u in [(0, 0.0, 0.1), (1, 1.0, 0.6), (2, 0.5, 0.9)]]
    assert mixed == alone


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_no_number_says_so_and_the_others_are_sampled(bad: float, temperature: float) -> None:
    torch.manual_seed(2)
    logits = normal(2, 3000)
    logits[0, 1500] = bad
    token_ids = sampled(logits, [temperature] * 2, [0.5] * 2)
    assert token_ids[0] == NOT_A_NUMBER
    assert token_ids[1] == sampled(logits[1:], [temperature], [0.5])[0] >= 0


def test_misfits_are_named() -> None:
    scratch = sampling_scratch(1, 1000, DEVICE)
    floats, wide = torch.zeros(2, device=DEVICE), torch.zeros(2, dtype=torch.float64, device=DEVICE)
    token_ids = ints([0, 0])
    with pytest.raises(ValueError, match="room for 1 rows, this batch needs 2"):
        sample(normal(2, 1000), floats, wide, token_ids, scratch)
    with pytest.raises(ValueError, match=r"uniforms is torch.float32, expected torch.float64"):
        sample(normal(2, 1000), floats, floats, token_ids, scratch)
    with pytest.raises(ValueError, match=r"logits is torch.bfloat16, expected torch.float32"):
        sample(normal(2, 1000, dtype=torch.bfloat16), floats, wide, token_ids, scratch)
