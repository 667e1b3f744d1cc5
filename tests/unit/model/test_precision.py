"""auto is int8 where the model's shapes fit, fp32 elsewhere; int8 that was asked for and does not fit is an error."""

import re
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.model.tiny import TinyLlama

from weir.core.device import Device, Precision, check_precision
from weir.kv.geometry import PAGE_TOKENS
from weir.model.errors import ModelError
from weir.model.files.config import load_model_config
from weir.model.files.digest import model_digest
from weir.model.precision import choose_arithmetic, page_geometry


def test_auto_takes_int8_where_the_shapes_fit(tiny: TinyLlama) -> None:
    config = load_model_config(tiny.source)
    assert [choose_arithmetic(asked, config) for asked in ("auto", "int8", "fp32")] == ["int8", "int8", "fp32"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 72}, "hidden_size is 72, expected a multiple of 32;"),
        ({"intermediate_size": 100}, "intermediate_size is 100, expected a multiple of 32;"),
        (
            {"num_heads": 5, "num_kv_heads": 1, "head_dim": 8},
            r"num_heads \* head_dim is 40, expected a multiple of 32;",
        ),
        ({"num_heads": 8, "head_dim": 12}, "int8: head_dim is 12, expected a multiple of 8;"),
    ],
)
def test_shapes_that_do_not_fit_run_in_fp32_unless_int8_is_asked_for(
    change: dict[str, Any], named: str, tiny: TinyLlama
) -> None:
    config = replace(load_model_config(tiny.source), **change)
    assert choose_arithmetic("auto", config) == "fp32"
    with pytest.raises(ModelError, match=f"{named} use --precision fp32"):
        choose_arithmetic("int8", config)


def test_a_digest_names_what_is_used_and_not_what_was_asked_for(tiny: TinyLlama) -> None:
    assert model_digest(tiny.source, "auto") == model_digest(tiny.source, "int8")
    assert model_digest(tiny.source, "auto") != model_digest(tiny.source, "fp32")


def test_exact_is_int8_on_a_cpu_and_anything_on_a_device(tiny: TinyLlama) -> None:
    config = load_model_config(tiny.source)
    assert [choose_arithmetic(asked, config, exact=True) for asked in ("auto", "int8")] == ["int8", "int8"]
    on_gpu = [choose_arithmetic(asked, config, "cuda", exact=True) for asked in ("auto", "bf16", "fp32")]
    assert on_gpu == ["bf16", "bf16", "fp32"]
    assert choose_arithmetic("auto", config, "interpreter", exact=True) == "fp32"


def test_exact_fp32_on_a_cpu_is_refused_whether_asked_for_or_all_that_there_is(tiny: TinyLlama) -> None:
    config = load_model_config(tiny.source)
    with pytest.raises(ModelError, match=r"exact: precision fp32 on device cpu .* use precision int8, which is exact"):
        choose_arithmetic("fp32", config, exact=True)
    with pytest.raises(ModelError, match=r"exact: hidden_size is 72, .* leave exact out for this model"):
        choose_arithmetic("auto", replace(config, hidden_size=72), exact=True)
    with pytest.raises(ModelError, match=r"exact: precision fp32 on device cpu"):
        model_digest(tiny.source, "fp32", exact=True)


@pytest.mark.parametrize("precision", ["fp8", "fp8-kv8"])
def test_exact_is_refused_with_matrices_of_one_byte(precision: Precision, tiny: TinyLlama) -> None:
    config = load_model_config(tiny.source)
    refusal = rf"exact: precision {precision} has matrix products that depend on the batch; use precision bf16"
    with pytest.raises(ModelError, match=refusal):
        choose_arithmetic(precision, config, "cuda", exact=True)
    assert choose_arithmetic("bf16-kv8", config, "cuda", exact=True) == "bf16-kv8"


def test_exact_pages_are_others_on_a_device_and_the_same_on_a_cpu(tiny: TinyLlama) -> None:
    plain, exact = (model_digest(tiny.source, "auto", "cuda", exact=exact) for exact in (False, True))
    assert plain != exact
    plain, exact = (model_digest(tiny.source, "auto", exact=exact) for exact in (False, True))
    assert plain == exact


def test_a_device_has_arithmetics_of_its_own(tiny: TinyLlama) -> None:
    config = load_model_config(tiny.source)
    assert [choose_arithmetic(asked, config, "cuda") for asked in ("auto", "fp8-kv8")] == ["bf16", "fp8-kv8"]
    assert [choose_arithmetic(asked, config, "interpreter") for asked in ("auto", "fp8")] == ["fp32", "fp8"]


@pytest.mark.parametrize(
    ("precision", "device", "problem"),
    [
        ("int8", "cuda", "precision int8: device cuda computes in bf16, fp32, fp8, bf16-kv8 or fp8-kv8; auto is bf16"),
        ("fp8", "cpu", "precision fp8: device cpu computes in int8 or fp32; auto is int8"),
        ("bf16", "cpu", "precision bf16: device cpu computes in int8 or fp32; auto is int8"),
        ("bf16", "interpreter", "precision bf16: device interpreter computes in fp32, fp8 or fp8-kv8; auto is fp32"),
    ],
)
def test_a_precision_that_the_device_lacks_is_refused(
    tiny: TinyLlama, precision: Precision, device: Device, problem: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        check_precision(precision, device)
    with pytest.raises(ModelError, match=re.escape(problem)):
        choose_arithmetic(precision, load_model_config(tiny.source), device)


def test_a_model_that_the_kernels_of_a_device_cannot_compute_is_refused(tiny: TinyLlama) -> None:
    config = replace(load_model_config(tiny.source), head_dim=8)
    with pytest.raises(ModelError, match=r"device cuda: head_dim is 8, the attention kernels take 16 to 256"):
        choose_arithmetic("auto", config, "cuda")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 72}, "hidden_size is 72, expected a multiple of 16"),
        (
            {"num_heads": 3, "num_kv_heads": 1, "head_dim": 24},
            r"num_heads \* head_dim is 72, expected a multiple of 16",
        ),
        ({"num_heads": 4096}, r"num_heads \* head_dim is 65536, a row is quantized up to 32768"),
    ],
)
def test_a_model_whose_matrices_do_not_fit_e4m3_products_is_refused(
    change: dict[str, Any], named: str, tiny: TinyLlama
) -> None:
    config = replace(load_model_config(tiny.source), head_dim=16, num_heads=4, num_kv_heads=2)
    assert choose_arithmetic("fp8", config, "cuda") == "fp8"
    with pytest.raises(ModelError, match=f"precision fp8: {named}.*; use --precision bf16 for this model"):
        choose_arithmetic("fp8", replace(config, **change), "cuda")


def test_pages_of_one_device_or_precision_are_not_taken_for_those_of_another(tiny: TinyLlama) -> None:
    on_gpu: list[tuple[Precision, Device]] = [("fp32", "cuda"), ("bf16", "cuda"), ("fp32", "interpreter")]
    on_gpu += [("fp8", "cuda"), ("fp8", "interpreter"), ("bf16-kv8", "cuda"), ("fp8-kv8", "cuda")]
    on_gpu += [("fp8-kv8", "interpreter")]
    asked = [*on_gpu, ("fp32", "cpu")]
    assert len({model_digest(tiny.source, precision, device) for precision, device in asked}) == len(asked)
    assert model_digest(tiny.source, "auto", "cuda") == model_digest(tiny.source, "bf16", "cuda")


def test_a_page_of_bf16_and_of_int8_is_half_as_large(tiny: TinyLlama) -> None:
    config = load_model_config(tiny.source)
    assert 2 * page_geometry(config, "bf16").page_bytes == page_geometry(config, "fp32").page_bytes
    assert page_geometry(config, "int8") == page_geometry(config, "bf16")
    assert page_geometry(config, "fp32") == config.page_geometry


def test_a_page_of_int8_has_a_byte_a_number_and_four_a_head_of_a_token(tiny: TinyLlama) -> None:
    config = load_model_config(tiny.source)
    numbers_bytes = page_geometry(config, "bf16").page_bytes // 2
    num_scales = config.num_layers * 2 * config.num_kv_heads * PAGE_TOKENS
    assert page_geometry(config, "bf16-kv8").page_bytes == numbers_bytes + 4 * num_scales
    assert page_geometry(config, "fp8-kv8") == page_geometry(config, "bf16-kv8")
    assert page_geometry(config, "fp8") == page_geometry(config, "bf16")
