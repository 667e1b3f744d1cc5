"""What the transfer service takes from the model, and what its settings may give instead."""

import pytest

from weir.model.errors import ModelError
from weir.model.files.dummy import MODEL_SHAPES
from weir.model.precision import page_geometry
from weir_transfer.config import TransferConfig, with_model_shape

TINY = TransferConfig(load="dummy", model_shape="tiny")


def test_page_size_context_and_digest_are_the_models() -> None:
    complete = with_model_shape(TINY)
    assert complete.page_bytes == page_geometry(MODEL_SHAPES["tiny"], "int8").page_bytes
    assert complete.max_context_tokens == 2048
    assert len(complete.model_digest) == 32


def test_pages_that_are_computed_exactly_have_a_digest_of_their_own() -> None:
    plain, exact = (
        with_model_shape(TransferConfig(load="dummy", model_shape="tiny", device="interpreter", exact=exact))
        for exact in (False, True)
    )
    assert plain.model_digest != exact.model_digest
    assert plain.page_bytes == exact.page_bytes


def test_a_shorter_context_makes_shorter_sequences() -> None:
    config = TransferConfig(load="dummy", model_shape="tiny", max_context_tokens=160)
    complete = with_model_shape(config)
    assert complete.max_context_tokens == 160
    assert complete.model_digest == with_model_shape(TINY).model_digest


def test_a_longer_context_than_the_models_is_refused() -> None:
    config = TransferConfig(load="dummy", model_shape="tiny", max_context_tokens=2049)
    with pytest.raises(ModelError, match="max_context_tokens 2049: the model's context is 2048"):
        with_model_shape(config)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"page_bytes": 4096}, "page_bytes and model_digest: give both"),
        ({"page_bytes": 4096, "model_digest": "ab"}, "and max_context_tokens with them"),
        ({"model_digest": "ab", "max_context_tokens": 64}, "page_bytes and model_digest: give both"),
        ({"arena_bytes": -1}, "arena_bytes -1: must be at least 0"),
        ({"workers_on_machine": 0}, r"workers_on_machine 0: must be in \[1, 256\]"),
        ({"max_context_tokens": -1}, "max_context_tokens -1: must not be negative"),
        ({"page_files_dir": "/p", "prefix_cache": False}, "page_files_dir '/p': needs prefix_cache"),
        ({"page_files_min_uses": 0}, "page_files_min_uses 0: must be at least 1"),
        ({"page_valkey_url": "http://h"}, r"page_valkey_url 'http://h': must be redis://"),
        ({"page_valkey_url": "redis://u:secret@h"}, r"page_valkey_url 'redis://\*\*\*@h': has a password in it"),
        ({"page_valkey_url": "redis://h?password=secret"}, "page_valkey_url 'redis://h': must be redis://"),
        ({"page_valkey_url": "redis://h#secret"}, "page_valkey_url 'redis://h': must be redis://"),
        ({"page_valkey_url": "redis://h?password=se@cret"}, r"page_valkey_url 'redis://\*\*\*': must be redis://"),
        ({"page_valkey_url": "redis://u:secr#et@h"}, r"page_valkey_url 'redis://\*\*\*': is no URL"),
        ({"page_valkey_url": "redis://h:6379/x"}, "names database 'x': must be a number"),
        ({"page_valkey_url": "redis://h:999999"}, "is no URL"),
        ({"page_valkey_url": "redis://10.0.0.7"}, "page_valkey_url 'redis://10.0.0.7:6379/0': .*give rediss://"),
        (
            {"page_valkey_url": "redis://10.0.0.7", "insecure_listen": True},
            "page_valkey_url 'redis://10.0.0.7:6379/0': .*set page_valkey_insecure",
        ),
        ({"page_valkey_url": "redis://localhost", "prefix_cache": False}, "page_valkey_url .*: needs prefix_cache"),
        ({"page_valkey_url": "redis://localhost", "page_valkey_ca_file": "/ca"}, "page_valkey_ca_file '/ca': needs"),
        ({"page_valkey_password_file": "/p"}, "page_valkey_password_file '/p': is of no use without"),
        ({"page_valkey_ttl_s": 59}, r"page_valkey_ttl_s 59: must be in \[60, 31622400\]"),
        ({"page_valkey_ttl_s": 1 << 40}, r"page_valkey_ttl_s 1099511627776: must be in \[60, 31622400\]"),
        ({"page_valkey_timeout_ms": 9}, r"page_valkey_timeout_ms 9: must be in \[10, 60000\]"),
        ({"page_valkey_timeout_ms": 60_001}, r"page_valkey_timeout_ms 60001: must be in \[10, 60000\]"),
        (
            {"page_memory_bytes": 1 << 30},
            "page_memory_bytes 1073741824: is for arenas on a device; .* arena_bytes more",
        ),
        ({"page_memory_bytes": -1}, "page_memory_bytes -1: must be at least 0"),
        (
            {"page_memory_bytes": 1 << 30, "device": "interpreter", "prefix_cache": False},
            "page_memory_bytes .*: needs prefix_cache",
        ),
        ({"load": "dummy"}, "load 'dummy': needs a model_shape"),
        ({"model_shape": "tiny"}, "model_shape 'tiny': is for load 'dummy' only"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        TransferConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"page_valkey_url": "rediss://ada@valkey.example:7000/3", "page_valkey_ca_file": "/ca"},
        {"page_valkey_url": "valkey://[::1]"},
        {"page_valkey_url": "redis://10.0.0.7", "page_valkey_insecure": True},
        {"page_memory_bytes": 1 << 30, "device": "interpreter"},
    ],
)
def test_tiers_that_go_together_are_taken(settings: dict[str, object]) -> None:
    TransferConfig(**settings)  # type: ignore[arg-type]


def test_what_is_given_is_not_read_from_the_model() -> None:
    given = TransferConfig(model="no/such/model", page_bytes=4096, max_context_tokens=64, model_digest="ab")
    assert with_model_shape(given) == given
