"""Settings of a decode worker, and what its engine makes of them."""

from pathlib import Path

import pytest

from weir.engine.batching.admission import PauseSettings
from weir.engine.batching.own_rules import Batching, JoinSettings, PrefillBatchSettings
from weir.engine.memory.preemption import PreemptionSettings
from weir.runtime.config import ConfigError, read_config
from weir.worker.roles.config import DecodeConfig


def test_by_default_batches_are_continuous_and_a_sequence_is_preempted_three_times_at_most() -> None:
    config = read_config(DecodeConfig, [], environ={})
    settings = config.running_settings(num_swap_slots=7, num_arena_pages=90)
    assert (settings.num_arena_pages, settings.prefill_batches) == (90, None)
    assert settings.join.batching is Batching.CONTINUOUS
    assert settings.preemption == PreemptionSettings(max_preemptions=3, num_swap_slots=7)
    assert config.swap_dir == Path("/dev/shm")


def test_rule_and_window_come_from_flags() -> None:
    config = read_config(DecodeConfig, ["--batching", "dynamic", "--batch-window-ms", "120"], environ={})
    assert config.running_settings(0, 9).join == JoinSettings(Batching.DYNAMIC, window_s=0.12)
    held = read_config(DecodeConfig, [], environ={"WEIR_BATCHING": "static-hold"})
    assert held.running_settings(0, 9).join.holds_rows


@pytest.mark.parametrize(
    ("flags", "is_on"),
    [((), False), (("--device", "cuda"), True), (("--device", "cuda", "--async-scheduling", "off"), False)],
)
def test_steps_are_launched_ahead_on_a_gpu_alone(flags: tuple[str, ...], is_on: bool) -> None:
    assert read_config(DecodeConfig, list(flags), environ={}).is_async_scheduling == is_on


def test_pauses_and_prefill_batches_come_from_flags() -> None:
    config = read_config(DecodeConfig, ["--max-pauses", "0"], environ={"WEIR_PREFILL_BATCHES": "true"})
    settings = config.running_settings(0, 9)
    assert settings.pauses == PauseSettings(max_pauses=0)
    assert settings.prefill_batches == PrefillBatchSettings()


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--batching", "adaptive", "continuous"),
        ("--batch-window-ms", "0", "batch_window_ms 0: must be in [1, 10000]"),
        ("--max-preemptions", "-1", "max_preemptions -1: must be in [0, 1000]"),
        ("--swap-bytes", "-2", "swap_bytes -2: must be in [-1,"),
        ("--max-pauses", "-1", "max_pauses -1: must be in [0, 1000]"),
        ("--policy", "luck", "policy 'luck': must be one of"),
        ("--chunk-tokens", "0", "chunk_tokens 0: must be at least 1"),
        ("--async-scheduling", "yes", "async_scheduling 'yes': must be auto, on or off"),
        ("--async-scheduling", "on", "async_scheduling on: steps run in the engine's own threads with device cpu"),
        ("--target-step-ms", "-1", "target_step_ms -1: must be in [0, 600000]"),
    ],
)
def test_a_bad_value_is_named(flag: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(DecodeConfig, [flag, value], environ={})
    assert words in caught.value.message
