"""What the transfer service takes from the model, and what its settings may give instead."""

import sys

import pytest

from weir.model.errors import ModelError
from weir.model.files.dummy import MODEL_SHAPES
from weir.model.precision import page_geometry
from weir.runtime.config import ConfigError
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


def test_nixl_is_for_memory_of_the_host_in_a_private_network() -> None:
    with pytest.raises(ValueError, match="whoever reaches its ports, which have no TLS, can read the arena"):
        TransferConfig(page_mover="nixl")
    with pytest.raises(ValueError, match="pages on a device are not read by NIXL"):
        TransferConfig(page_mover="nixl", device="cuda", insecure_listen=True)
    assert TransferConfig(page_mover="nixl", insecure_listen=True).page_mover == "nixl"


def test_nixl_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    with pytest.raises(ConfigError, match=r"needs nixl_cu12, .*weir-llm\[nixl\]"):
        TransferConfig(page_mover="nixl", insecure_listen=True)
