"""How large an arena the transfer service makes, for sequences of which length, and what it says of that."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from weir.core.errors import Unavailable
from weir.kv.arena.segment import Segment
from weir.kv.arena_size import LEAST_CONTEXT_TOKENS, FreeMemory
from weir.kv.geometry import num_pages_for, num_reservable_pages
from weir.kv.layout import layout_of
from weir.model.errors import ModelError
from weir.model.files.source import resolve_model
from weir.runtime.config import ConfigError, read_config
from weir_transfer.arena import claim_arena
from weir_transfer.config import TransferConfig, with_model_shape
from weir_transfer.sizing import ArenaSize, look_at_machine, size_arena

MIB, GIB = 1 << 20, 1 << 30
LLAMA = TransferConfig(load="dummy", model_shape="llama-3.2-1b")


def size(config: TransferConfig, *, left: int = 64 * GIB, shm: int = 64 * GIB) -> ArenaSize:
    return size_arena(config, with_model_shape(config), lambda config: FreeMemory(left, shm))


def test_with_memory_a_model_has_its_whole_context() -> None:
    made = size(replace(LLAMA, model_shape="smollm2-135m"))
    assert made.geometry.max_context_tokens == 8192
    assert re.fullmatch(r"arena of 1\.\d GiB, room for 65,\d{3} tokens; max_context_tokens 8192", made.text)


def test_with_little_memory_the_context_is_what_fits_and_that_is_said() -> None:
    made = size(LLAMA, left=2 * GIB)
    assert layout_of(made.geometry).memory_bytes <= GIB
    bounded = made.geometry.max_context_tokens
    assert LEAST_CONTEXT_TOKENS < bounded < 131_072
    assert num_reservable_pages(made.geometry.num_pages) >= num_pages_for(bounded)
    assert f"max_context_tokens is {bounded}, not the model's 131072: --arena-bytes " in made.text
    named = re.search(r"--arena-bytes (\d+MiB), where that is free, would hold it", made.text)
    assert named is not None
    asked = replace(LLAMA, arena_bytes=int(named[1].removesuffix("MiB")) * MIB)
    assert size(asked, left=0).geometry.max_context_tokens == 131_072


def test_an_arena_of_a_given_size_bounds_the_context_too() -> None:
    made = size(replace(LLAMA, arena_bytes=2 * GIB), left=0, shm=0)
    assert 50_000 < made.geometry.max_context_tokens < 60_000
    assert "would hold it" in made.text


@pytest.mark.parametrize("arena_bytes", [0, 2 * GIB])
def test_a_context_that_is_asked_for_and_does_not_fit_is_an_error_with_the_numbers(arena_bytes: int) -> None:
    asked = replace(LLAMA, max_context_tokens=100_000, arena_bytes=arena_bytes)
    with pytest.raises(ValueError, match=r"too small for one sequence of 100000 tokens") as caught:
        size(asked, left=4 * GIB)
    least = re.search(
        r"give at least (\d+) \(3\.\d GiB\), or a smaller max_context_tokens; (\d+) would fit", str(caught.value)
    )
    assert least is not None
    assert size(replace(asked, arena_bytes=int(least[1]))).geometry.max_context_tokens == 100_000
    assert size(replace(asked, max_context_tokens=int(least[2])), left=4 * GIB).geometry.num_pages
    assert ("what the memory that is free allows" in str(caught.value)) == (arena_bytes == 0)


def test_a_context_that_is_asked_for_gets_its_arena_where_memory_is_free() -> None:
    made = size(replace(LLAMA, max_context_tokens=131_072))
    assert made.geometry.max_context_tokens == 131_072
    assert layout_of(made.geometry).memory_bytes > 4 * GIB


def test_a_context_of_a_few_tokens_is_not_chosen_in_silence() -> None:
    with pytest.raises(ValueError, match="too small for one sequence of 131072 tokens"):
        size(LLAMA, shm=16 * MIB)


def test_a_segment_that_is_there_keeps_the_size_that_was_chosen_for_it(tmp_path: Path) -> None:
    config = TransferConfig(load="dummy", model_shape="tiny", instance="kept", segment_dir=tmp_path, num_slots=4)
    complete = with_model_shape(config)
    chosen = size(config, left=2 * 20 * MIB, shm=20 * MIB).geometry
    Segment.create(complete.segment_path, chosen, complete.model_digest).close()
    assert size(config).geometry == chosen
    assert size(replace(config, num_slots=5)).geometry != chosen
    assert size(replace(config, precision="fp32")).geometry.page_bytes != chosen.page_bytes
    asked = replace(config, arena_bytes=8 * MIB)
    assert layout_of(size(asked).geometry).memory_bytes <= 8 * MIB


def test_what_workers_will_take_is_not_counted_as_free() -> None:
    one, four = (look_at_machine(replace(LLAMA, workers_on_machine=number), "") for number in (1, 4))
    assert one.left_bytes - four.left_bytes > 500 * MIB


def test_weights_that_are_packed_already_are_not_packed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIR_CACHE", str(tmp_path))
    digest = with_model_shape(LLAMA).model_digest
    before = look_at_machine(LLAMA, digest).left_bytes
    folder = tmp_path / "packed"
    folder.mkdir()
    (folder / f"{resolve_model(LLAMA.model_reference).name}-{digest}-2.weights").touch()
    largest = 128_256 * 2048
    assert look_at_machine(LLAMA, digest).left_bytes - before > 12 * largest


def test_too_little_free_memory_is_no_wrong_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is tried again: another stack may be about to end."""
    monkeypatch.setattr("weir_transfer.sizing.free_disk_bytes", lambda folder: 16 * MIB)
    with pytest.raises(Unavailable, match="what the memory that is free allows"):
        claim_arena(replace(LLAMA, segment_dir=tmp_path), lambda identity: None)


def test_an_arena_that_cannot_be_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    config = replace(LLAMA, segment_dir=tmp_path, arena_bytes=MIB)
    with pytest.raises(ConfigError, match=f"arena_bytes {MIB}: too small for one sequence"):
        claim_arena(config, lambda identity: None)
    assert list(tmp_path.iterdir()) == []


def test_sizes_take_units(tmp_path: Path) -> None:
    toml = tmp_path / "weir.toml"
    toml.write_text('[transfer]\narena_bytes = "1.5GiB"\n')
    assert read_config(TransferConfig, ["--arena-bytes", "16 GiB"], environ={}).arena_bytes == 16 * GIB
    assert read_config(TransferConfig, [], environ={"WEIR_ARENA_BYTES": "3MB"}).arena_bytes == 3_000_000
    assert read_config(TransferConfig, ["--config", str(toml)], environ={}).arena_bytes == GIB * 3 // 2


def on_gpu(gpu_gib: int, model_shape: str, **settings: int) -> ArenaSize:
    config = TransferConfig(load="dummy", model_shape=model_shape, device="cuda", **settings)  # type: ignore[arg-type]
    return size_arena(config, with_model_shape(config), look_at_nothing, lambda: gpu_gib * GIB)


def look_at_nothing(config: TransferConfig) -> FreeMemory:
    raise AssertionError(f"the host's memory is none of the pages of device {config.device}")


def test_on_a_gpu_pages_get_what_the_workers_leave() -> None:
    made = on_gpu(80, "llama-3.1-8b")
    assert made.geometry.pages_on_device
    assert made.geometry.max_context_tokens == 131_072
    assert 45 * GIB < made.geometry.page_memory_bytes < 60 * GIB
    with_nine = on_gpu(80, "llama-3.1-8b", workers_on_machine=9).geometry.page_memory_bytes
    assert with_nine < made.geometry.page_memory_bytes - 7 * GIB


def test_on_a_small_gpu_the_context_is_what_fits() -> None:
    made = on_gpu(24, "llama-3.1-8b", workers_on_machine=1)
    assert LEAST_CONTEXT_TOKENS < made.geometry.max_context_tokens < 131_072
    with pytest.raises(ModelError, match="start fewer workers, choose a smaller model, or give --arena-bytes"):
        on_gpu(16, "llama-3.1-8b")


def test_a_small_model_takes_no_more_of_a_gpu_than_all_its_slots_can_fill() -> None:
    made = on_gpu(80, "tiny", num_slots=10)
    assert num_reservable_pages(made.geometry.num_pages) == pytest.approx(10 * num_pages_for(2048), abs=2)


def test_a_size_that_was_asked_for_asks_no_gpu() -> None:
    config = TransferConfig(load="dummy", model_shape="tiny", device="cuda", arena_bytes=GIB)
    made = size_arena(config, with_model_shape(config), look_at_nothing, lambda: 1 // 0)
    assert made.geometry.page_memory_bytes == GIB
