"""Balanced keys give the same scores, and fit one scale."""

from dataclasses import replace

import pytest
import torch

from benchmarks.quality.formats import FORMATS, Format, log_probabilities, with_key_outliers
from weir.model.architecture import ModelConfig, tensor_shapes
from weir.model.files.dummy import shape_named
from weir.model.torch.key_balance import balance_keys
from weir.model.torch.weights import LayerWeights, WeightFormat, Weights, filled_weights

CONFIG = replace(shape_named("tiny"), query_key_value_bias=True)
NORMED = replace(shape_named("tiny"), query_key_norm=True)
TOKENS = torch.arange(60) * 7 % 1024
INT8_PAGES = FORMATS["int8 pages, a scale a head of a token"]


def weights_of(config: ModelConfig, kept: WeightFormat) -> Weights:
    shapes, generator = tensor_shapes(config), torch.Generator().manual_seed(0)

    def read(name: str) -> torch.Tensor:
        return torch.randn(shapes[name], generator=generator) * (0.1 if len(shapes[name]) == 2 else 1.0)

    return filled_weights(torch.device("cpu"), kept, config, read)


def divergence(exact: torch.Tensor, found: torch.Tensor) -> float:
    return float((exact.exp() * (exact - found)).sum(-1).mean())


def test_no_bit_of_what_a_model_says_changes() -> None:
    weights = with_key_outliers(weights_of(CONFIG, WeightFormat(torch.float32)), CONFIG, 16)
    before = log_probabilities(CONFIG, weights, TOKENS, Format())
    matrix = weights.layers[0].query_key_value.clone()
    balance_keys(weights, CONFIG)
    assert not torch.equal(weights.layers[0].query_key_value, matrix), "something was to be balanced"
    assert torch.equal(log_probabilities(CONFIG, weights, TOKENS, Format()), before)


def test_outliers_cost_int8_pages_less_than_without_it() -> None:
    weights = with_key_outliers(weights_of(CONFIG, WeightFormat(torch.float32)), CONFIG, 16)
    exact = log_probabilities(CONFIG, weights, TOKENS, Format())
    unbalanced = divergence(exact, log_probabilities(CONFIG, weights, TOKENS, INT8_PAGES))
    balance_keys(weights, CONFIG)
    balanced = divergence(exact, log_probabilities(CONFIG, weights, TOKENS, INT8_PAGES))
    assert balanced < unbalanced / 4


def with_norm_outliers(weights: Weights, config: ModelConfig, factor: float) -> Weights:
    """As `with_key_outliers`, by the weights of the heads' norms."""

    def changed(layer: LayerWeights) -> LayerWeights:
        assert layer.query_norm is not None
        assert layer.key_norm is not None
        factors = torch.ones(config.head_dim)
        factors[[config.head_dim // 2 - 1, config.head_dim - 1]] = factor
        return replace(layer, query_norm=layer.query_norm / factors, key_norm=layer.key_norm * factors)

    return replace(weights, layers=tuple(map(changed, weights.layers)))


def test_keys_that_are_normed_are_balanced_by_the_weights_of_the_norm() -> None:
    weights = with_norm_outliers(weights_of(NORMED, WeightFormat(torch.float32)), NORMED, 16)
    exact = log_probabilities(NORMED, weights, TOKENS, Format())
    unbalanced = divergence(exact, log_probabilities(NORMED, weights, TOKENS, INT8_PAGES))
    matrix = weights.layers[0].query_key_value.clone()
    balance_keys(weights, NORMED)
    assert torch.equal(weights.layers[0].query_key_value, matrix)
    assert torch.equal(log_probabilities(NORMED, weights, TOKENS, Format()), exact)
    assert divergence(exact, log_probabilities(NORMED, weights, TOKENS, INT8_PAGES)) < unbalanced / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matrices_in_e4m3_are_balanced_by_their_scales_alone(dtype: torch.dtype) -> None:
    kept = WeightFormat(dtype, is_fp8=True)
    weights, balanced = weights_of(CONFIG, kept), weights_of(CONFIG, kept)
    balance_keys(balanced, CONFIG)
    layer, other = weights.layers[1], balanced.layers[1]
    assert torch.equal(layer.query_key_value.float(), other.query_key_value.float())
    assert layer.scales.query_key_value is not None
    assert other.scales.query_key_value is not None
    assert layer.query_key_value_bias is not None
    assert other.query_key_value_bias is not None
    ratios = other.scales.query_key_value / layer.scales.query_key_value
    assert torch.equal(ratios, ratios.log2().round().exp2()), "powers of two"
    assert torch.equal(other.query_key_value_bias, layer.query_key_value_bias * ratios.to(dtype))
    values = CONFIG.num_kv_heads * CONFIG.head_dim
    assert bool((ratios[-values:] == 1).all())
    half, group = CONFIG.head_dim // 2, CONFIG.num_heads // CONFIG.num_kv_heads
    by_head = ratios[:-values].view(-1, 2, half)
    assert torch.equal(by_head[:, 0], by_head[:, 1]), "a pair that is turned has one factor"
    queries, keys = by_head[: CONFIG.num_heads, 0], by_head[CONFIG.num_heads :, 0]
    assert bool((queries * keys.repeat_interleave(group, 0) == 1).all())
    assert float(keys.min()) < float(keys.max())
