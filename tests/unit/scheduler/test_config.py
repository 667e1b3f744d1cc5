"""Settings of the scheduler."""

import pytest

from weir.runtime.config import ConfigError, read_config
from weir.scheduling.limits import DEFAULT_LANES, CoreLimits, LaneLimits, parse_lane
from weir_scheduler.config import SchedulerConfig


def test_the_defaults_of_config_and_core_are_the_same() -> None:
    assert read_config(SchedulerConfig, [], environ={}).limits == CoreLimits(lanes=DEFAULT_LANES)


def test_lanes_come_from_flags_or_environment_in_their_order() -> None:
    argv = ["--lanes", "gold:10:5,lead:20:7.5", "--default-lane", "lead"]
    limits = read_config(SchedulerConfig, argv, environ={}).limits
    assert limits.lanes == (LaneLimits("gold", 10, 5.0), LaneLimits("lead", 20, 7.5))
    environ = {"WEIR_LANES": "only:1:1", "WEIR_DEFAULT_LANE": "only"}
    assert read_config(SchedulerConfig, [], environ=environ).limits.default_lane == "only"


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--lanes", "gold", "lane 'gold': must be NAME:MAX_QUEUED:MAX_WAIT_S"),
        ("--lanes", "gold:0:1", "max_queued 0: must be in [1, 1000000000]"),
        ("--lanes", "gold:1:inf", "max_wait_s inf: must be in [0.001, 86400]"),
        ("--lanes", "Gold!:1:1", "a name is 1 to 32"),
        ("--lanes", "standard:1:1,standard:2:2", "name at least one, each once"),
        ("--default-lane", "vip", "'vip': is none of interactive, standard, batch"),
        ("--max-prefills-per-worker", "0", "max_prefills_per_worker 0: must be in [1, 1000000000]"),
        ("--page-overcommit", "0.5", "page_overcommit 0.5: must be in [1, 100]"),
        ("--gather-s", "nan", "gather_s nan: must be in"),
    ],
)
def test_a_bad_value_is_named(flag: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(SchedulerConfig, [flag, value], environ={})
    assert words in caught.value.message


@pytest.mark.parametrize("text", ["", "a", "a:b:c", "a:1", "a:1:1:1", ":1:1"])
def test_what_is_no_lane_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="lane"):
        parse_lane(text)
