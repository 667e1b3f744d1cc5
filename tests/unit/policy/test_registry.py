"""Policies by name and text; whatever is wrong is named, with what would be right."""

import pytest

from weir.policy.registry import PolicySpec, describe_policy, policy_names


def test_every_policy_is_made_by_its_name_from_what_parse_gives() -> None:
    for name in policy_names():
        assert PolicySpec.parse(name).make().name == name


def test_each_use_of_a_policy_has_state_of_its_own() -> None:
    one, other = PolicySpec("slai").make(), PolicySpec("slai").make()
    assert one.order is not other.order
    assert one.step_budget is not other.step_budget


def test_a_name_with_values() -> None:
    spec = PolicySpec.parse("ltr: threshold_picks = 5, starvation=off")
    assert spec == PolicySpec("ltr", {"threshold_picks": 5, "starvation": 0})
    assert PolicySpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sjf", r"policy 'sjf': must be one of fcfs, shortest-prompt, "),
        ("fcfs:a=1", r"policy fcfs: no parameter 'a' \(it has no parameters\)"),
        ("ltr:treshold=1", r"no parameter 'treshold' \(starvation: on or off, default on; threshold_picks: "),
        ("ltr:period", r"'period': must be KEY=VALUE"),
        ("ltr:period=1,period=2", r"period is set twice"),
        ("ltr:period=often", r"period 'often': must be a number, on or off"),
        ("ltr:period=0", r"period 0: must be a whole number of at least 1"),
        ("ltr:period=1.5", r"period 1.5: must be a whole number of at least 1"),
        ("ltr:starvation=2", r"starvation 2.0: must be on or off"),
        ("slai:full_at=1.5", r"full_at 1.5: must be a number in \[0, 1\]"),
        ("slai:offset=nan", r"offset nan: must be a number of at least 0"),
        ("slai:offset=inf", r"offset inf: must be a number of at least 0"),
        ("wait:base_ms=0", r"base_ms 0.0: must be a number of at least 0.001"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicySpec.parse(text)


def test_plain_numbers_are_checked_as_text_is() -> None:
    with pytest.raises(ValueError, match=r"policy ltr: period 0: must be"):
        PolicySpec("ltr", {"period": 0.0}).make()


def test_a_policy_describes_its_parameters() -> None:
    assert describe_policy("fcfs") == "it has no parameters"
    assert "max_age: a number in [0, 1], default 0.8" in describe_policy("srtf")
