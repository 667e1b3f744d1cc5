"""Every architecture, in every form that Weir serves, gives the logits of transformers at every position."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from tests.unit.model.architectures import BASE, VARIANTS, Variant, save_variant
from tests.unit.model.tiny import LogitsProbe, TinyLlama, chunk, prompt_ids

from weir.model.architecture import SlidingWindow
from weir.model.errors import ModelError
from weir.model.files.config import load_model_config
from weir.model.files.digest import model_digest
from weir.model.files.safetensors import safetensors_files
from weir.model.files.source import resolve_model
from weir.model.torch.weights import load_weights

TABLE = (9, 2, 31, 4, 17, 40, 8, 33, 50, 21, 5, 60, 12)
LENGTH = 200
BY_NAME = {variant.name: variant for variant in VARIANTS}


def assert_same_logits(tiny: TinyLlama) -> None:
    """In one chunk, and in chunks of odd sizes followed by single tokens; far past any original context."""
    config = load_model_config(tiny.source)
    length = min(LENGTH, config.max_context_tokens)
    ids = prompt_ids(length, seed=1)
    expected = tiny.logits(ids)
    whole = LogitsProbe(tiny.source).run_alone(chunk(0, ids, 0, length, TABLE))
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
    probe = LogitsProbe(tiny.source)
    cuts = [0, 1, 18, 65, 66, length - 9, *range(length - 8, length + 1)]
    pieces = [probe.run_alone(chunk(0, ids, start, end, TABLE)) for start, end in itertools.pairwise(cuts)]
    torch.testing.assert_close(torch.cat(pieces), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_position_has_the_logits_of_transformers(variant: Variant, tmp_path: Path) -> None:
    assert_same_logits(save_variant(tmp_path, variant))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_half_precision_weights_are_widened_exactly(name: str, tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert_same_logits(save_variant(tmp_path / str(dtype), BY_NAME[name], dtype))


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "qwen3"])
def test_a_model_in_shards_is_read_by_its_index(name: str, tmp_path: Path) -> None:
    tiny = save_variant(tmp_path, BY_NAME[name], max_shard_size="60KB")
    assert len(safetensors_files(tmp_path)) > 2
    # Mistral's repositories hold the weights a second time, under other names and in no index
    (tmp_path / "consolidated.safetensors").write_bytes(b"of no interest")
    (tmp_path / "stray.safetensors").write_bytes(b"of no interest")
    assert_same_logits(tiny)


def test_without_an_index_a_second_copy_in_mistrals_own_form_is_left_alone(tmp_path: Path) -> None:
    tiny = save_variant(tmp_path, BY_NAME["mistral"])
    (tmp_path / "consolidated.safetensors").write_bytes(b"of no interest")
    assert_same_logits(tiny)


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, "names gone.safetensors, which the folder does not have"),
        ({"weight_map": {"a": "../model.safetensors"}}, r"names \.\./model\.safetensors, which"),
        ({"weight_map": {}}, "names no file"),
        ({"weights": {}}, "cannot be read as an index"),
        ([], "cannot be read as an index"),
        ({"weight_map": {"a": "n" * 300}}, "names n{200}, which"),
    ],
)
def test_an_index_that_cannot_be_followed_is_refused(index: object, problem: str, tmp_path: Path) -> None:
    tiny = save_variant(tmp_path, BY_NAME["llama"])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=problem):
        load_weights(tiny.source, load_model_config(tiny.source))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_hidden_layers": 1 << 63}, "num_layers is 9223372036854775808, expected at most 1024"),
        ({"head_dim": 1 << 40}, "head_dim is 1099511627776, expected at most 4096"),
        ({"vocab_size": 1 << 40}, "vocab_size is 1099511627776, expected at most"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf, expected a number"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta is nan, expected a number"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta is 1000.*, expected a number"),
        ({"model_type": "gemma2", "sliding_window_pattern": 0, "hidden_activation": "gelu_pytorch_tanh"}, ""),
    ],
)
def test_sizes_that_no_model_has_are_refused_by_name(change: dict[str, object], problem: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"model_type": "qwen2"} | change))
    if not problem:  # a period of no layers: as of one
        assert load_model_config(resolve_model(str(tmp_path))).window is None
        return
    with pytest.raises(ModelError, match=problem):
        load_model_config(resolve_model(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("mistral", None),
        ("mistral-sliding-window", SlidingWindow(60, (True, True))),
        ("qwen2-sliding-window", SlidingWindow(60, (False, True))),
        ("qwen2-sliding-window-past-the-last-layer", None),
        ("qwen3-sliding-window", SlidingWindow(60, (False, True))),
    ],
)
def test_layers_have_the_window_that_the_configuration_says(
    name: str, window: SlidingWindow | None, tmp_path: Path
) -> None:
    config = load_model_config(save_variant(tmp_path, BY_NAME[name]).source)
    assert (config.window, config.max_context_tokens) == (window, 256)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields.pop("layer_types", None)  # older versions of transformers did not write it
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert load_model_config(resolve_model(str(tmp_path))).window == window


@pytest.mark.parametrize("change", [{"use_sliding_window": False}, {"sliding_window": 256}])
def test_a_window_that_is_switched_off_or_longer_than_the_context_is_none(
    change: dict[str, object], tmp_path: Path
) -> None:
    config = BASE | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    assert load_model_config(resolve_model(str(tmp_path))).window is None


def test_longrope_is_chosen_once_by_the_longest_context_that_is_served(tmp_path: Path) -> None:
    tiny = save_variant(tmp_path, BY_NAME["phi3-longrope"])
    ids = prompt_ids(64, seed=1)
    short = LogitsProbe(tiny.source, max_context_tokens=64).run_alone(chunk(0, ids, 0, 64, TABLE))
    torch.testing.assert_close(short, tiny.logits(ids), atol=1e-4, rtol=0)
    long = LogitsProbe(tiny.source, max_context_tokens=65).run_alone(chunk(0, ids, 0, 64, TABLE))
    assert float((long - short).abs().max()) > 0.1
    served = [load_model_config(tiny.source, longest) for longest in (64, 65)]
    assert [config.max_context_tokens for config in served] == [64, 65], "no worker serves more than it was chosen for"
    digests = {model_digest(tiny.source, "fp32", max_context_tokens=longest) for longest in (0, 64, 65, 256)}
    assert len(digests) == 3, "pages of the one are none of the other"


def test_other_models_are_the_same_whatever_context_is_served(tmp_path: Path) -> None:
    tiny = save_variant(tmp_path, BY_NAME["llama"])
    assert model_digest(tiny.source, "fp32", max_context_tokens=64) == model_digest(tiny.source, "fp32")


def test_mistral_has_a_window_unless_its_configuration_says_no(tmp_path: Path) -> None:
    config = BASE | {"model_type": "mistral", "max_position_embeddings": 32_768}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model_config(resolve_model(str(tmp_path))).window == SlidingWindow(4096, (True, True))


def test_biases_that_the_architecture_does_not_have_are_refused(tmp_path: Path) -> None:
    save_variant(tmp_path, BY_NAME["qwen2"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    source = resolve_model(str(tmp_path))
    with pytest.raises(ModelError, match=r"k_proj\.bias is not part of a model of its architecture"):
        load_weights(source, load_model_config(source))


def test_without_a_word_heads_are_as_wide_as_in_transformers(tmp_path: Path) -> None:
    save_variant(tmp_path, BY_NAME["qwen3-large-epsilon"])
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert load_model_config(resolve_model(str(tmp_path))).head_dim == 128


def test_what_two_files_say_of_the_end_of_a_text_is_taken_once(tmp_path: Path) -> None:
    save_variant(tmp_path, BY_NAME["llama"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8, 7]}))
    assert load_model_config(resolve_model(str(tmp_path))).eos_token_ids == (7, 8)
