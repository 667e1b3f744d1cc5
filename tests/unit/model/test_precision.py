"""auto is int8 where the model's shapes fit, fp32 elsewhere; int8 that was asked for and does not fit is an error."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.model.tiny import TinyLlama

from weir.model.config import load_model_config
from weir.model.digest import model_digest
from weir.model.errors import ModelError
from weir.model.precision import arithmetic_key, choose_arithmetic


def test_auto_takes_int8_where_the_shapes_fit(tiny: TinyLlama) -> None:
    config = load_model_config(tiny.source)
    assert [choose_arithmetic(asked, config) for asked in ("auto", "int8", "fp32")] == ["int8", "int8", "fp32"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 72}, "hidden_size is 72"),
        ({"intermediate_size": 100}, "intermediate_size is 100"),
        ({"head_dim": 10}, r"num_heads \* head_dim is 40"),
    ],
)
def test_shapes_that_do_not_fit_run_in_fp32_unless_int8_is_asked_for(
    change: dict[str, Any], named: str, tiny: TinyLlama
) -> None:
    config = replace(load_model_config(tiny.source), **change)
    assert choose_arithmetic("auto", config) == "fp32"
    with pytest.raises(ModelError, match=f"{named}, expected a multiple of 32; use --precision fp32"):
        choose_arithmetic("int8", config)


def test_a_digest_names_what_is_used_and_not_what_was_asked_for(tiny: TinyLlama) -> None:
    config = load_model_config(tiny.source)
    assert arithmetic_key("auto", config) == arithmetic_key("int8", config) != arithmetic_key("fp32", config)
    assert model_digest(tiny.source, "auto") == model_digest(tiny.source, "int8")
    assert model_digest(tiny.source, "auto") != model_digest(tiny.source, "fp32")
