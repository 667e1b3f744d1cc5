"""Settings of a decode worker, and what its engine makes of them."""

from pathlib import Path

import pytest

from weir.engine.join import Batching, JoinSettings
from weir.engine.preemption import PreemptionSettings
from weir.runtime.config import ConfigError, read_config
from weir_decode.config import DecodeConfig


def test_by_default_batches_are_continuous_and_a_sequence_is_preempted_three_times_at_most() -> None:
    config = read_config(DecodeConfig, [], environ={})
    settings = config.running_settings(num_swap_places=7)
    assert settings.join.batching is Batching.CONTINUOUS
    assert settings.preemption == PreemptionSettings(max_preemptions=3, num_places=7)
    assert config.swap_dir == Path("/dev/shm")


def test_rule_and_window_come_from_flags() -> None:
    config = read_config(DecodeConfig, ["--batching", "dynamic", "--batch-window-ms", "120"], environ={})
    assert config.running_settings(0).join == JoinSettings(Batching.DYNAMIC, window_s=0.12)
    assert read_config(DecodeConfig, [], environ={"WEIR_BATCHING": "static-hold"}).running_settings(0).join.holds_rows


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--batching", "adaptive", "continuous"),
        ("--batch-window-ms", "0", "batch_window_ms 0: must be in [1, 10000]"),
        ("--max-preemptions", "-1", "max_preemptions -1: must be in [0, 1000]"),
        ("--swap-bytes", "-2", "swap_bytes -2: must be in [-1,"),
        ("--chunk-tokens", "0", "chunk_tokens 0: must be in [1,"),
    ],
)
def test_a_bad_value_is_named(flag: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(DecodeConfig, [flag, value], environ={})
    assert words in caught.value.message
