"""The limits and the policy in force: file, changes at run time, what an earlier scheduler left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.bus.codec import decode, encode
from weir.bus.configuration import AccessRules, LimitsInForce, LimitsOverride, PolicyChoice
from weir.core.errors import InvalidRequest
from weir.policy.registry import PolicySpec
from weir.scheduling.limits import CoreLimits
from weir.scheduling.limits_file import change_limits
from weir_scheduler.effective_limits import EffectiveLimits

DIGEST = "ab" * 32
FILE = f"""
[tenants.acme]
weight = 2
requests_per_min = 60
api_key_digests = ["{DIGEST}"]
lanes = ["batch"]
isolates_cache = true
"""


def effective_limits(policy: str = "fcfs") -> EffectiveLimits:
    return EffectiveLimits(CoreLimits(), policy)


def field_of(refused: pytest.ExceptionInfo[InvalidRequest]) -> str:
    return refused.value.violations[0].field


def test_a_file_goes_over_the_flags_and_says_whether_it_is_news() -> None:
    reservations = effective_limits()
    assert reservations.take_file(FILE)
    assert reservations.limits.tenants_by_name["acme"].weight == 2
    assert not reservations.take_file(FILE)
    assert reservations.take_file(FILE + "# a remark\n")


def test_a_wrong_file_or_change_leaves_everything_as_it_was() -> None:
    reservations = effective_limits()
    reservations.take_file(FILE)
    reservations.change([("tenants.acme.weight", "3")])
    before = (reservations.limits, dict(reservations.overrides), reservations.file_digest)
    with pytest.raises(InvalidRequest) as refused:
        reservations.take_file(FILE + "wieght = 2\n")
    assert field_of(refused) == "tenants.acme.wieght"
    for changes, field in (
        ([("tenants.acme.weight", "0")], "tenants.acme"),
        ([("tenants.acme.weight", "4"), ("lanes.vip.weight", "2")], "lanes.vip.weight"),
        ([("nothing", "1")], "nothing"),
        ([("lanes", "1")], "lanes"),
        ([("lanes.batch", "1")], "lanes.batch"),
        ([("lanes.batch.max_queued", "many")], "lanes.batch.max_queued"),
        ([("lanes.batch.max_queue", "1")], "lanes.batch.max_queue"),
        ([("default_tenant.name", "x")], "default_tenant.name"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            reservations.change(changes)
        assert field_of(refused) == field
    assert (reservations.limits, dict(reservations.overrides), reservations.file_digest) == before


def test_changes_add_up_until_the_file_says_something_new() -> None:
    reservations = effective_limits()
    reservations.take_file(FILE)
    reservations.change([("tenants.acme.weight", "3"), ("lanes.batch.max_queued", "7")])
    reservations.change([("tenants.acme.weight", "5"), ("tenants.new.max_in_flight", "1"), ("lane_order", "weighted")])
    limits = reservations.limits
    assert limits.tenants_by_name["acme"].weight == 5
    assert limits.tenants_by_name["acme"].requests_per_min == 60
    assert limits.lanes_by_name["batch"].max_queued == 7
    assert limits.tenants_by_name["new"].max_in_flight == 1
    assert limits.lane_order == "weighted"
    assert reservations.take_file(FILE.replace("= 60", "= 90"))
    assert dict(reservations.overrides) == {}
    assert reservations.limits.tenants_by_name["acme"].weight == 2
    assert "new" not in reservations.limits.tenants_by_name


def test_values_are_toml_and_a_word_needs_no_quotes() -> None:
    changed = change_limits(CoreLimits(), [("default_tenant.lanes", '["batch"]'), ("default_lane", "batch")])
    assert (changed.default_tenant.lanes, changed.default_lane) == (("batch",), "batch")
    assert change_limits(CoreLimits(), [("default_lane", '"batch"')]).default_lane == "batch"


@given(st.floats(0.001, 1000), st.integers(0, 10**6), st.booleans())
def test_limits_in_force_written_as_a_file_are_the_same_limits(weight: float, bound: int, isolates: bool) -> None:
    reservations = effective_limits()
    reservations.change(
        [
            ("tenants.a-b.weight", repr(weight)),
            ("tenants.a-b.max_queued", str(bound)),
            ("default_tenant.isolates_cache", str(isolates).lower()),
        ]
    )
    again = effective_limits()
    again.take_file(reservations.toml)
    assert again.limits == reservations.limits


def test_the_next_scheduler_goes_on_with_changes_of_the_same_file_and_policy() -> None:
    first = effective_limits("ltr")
    first.take_file(FILE)
    first.change([("tenants.acme.weight", "3")])
    first.choose_policy("srtf")
    kept = decode(LimitsInForce, encode(first.limits_in_force(7)))
    choice = decode(PolicyChoice, encode(first.policy_choice(7)))

    same = effective_limits("ltr")
    same.take_file(FILE)
    same.go_on_from(kept, has_read_file=True)
    same.go_on_with(choice)
    assert same.limits == first.limits
    assert str(same.policy) == "srtf"

    changed = effective_limits("edf")
    changed.take_file(FILE.replace("= 60", "= 90"))
    changed.go_on_from(kept, has_read_file=True)
    changed.go_on_with(choice)
    assert changed.limits.tenants_by_name["acme"].weight == 2
    assert str(changed.policy) == "edf"


def test_beside_a_faulty_file_the_next_scheduler_goes_on_from_the_last_right_one() -> None:
    first = effective_limits()
    first.take_file(FILE)
    first.change([("tenants.acme.weight", "3")])
    second = effective_limits()
    second.go_on_from(first.limits_in_force(7), has_read_file=False)
    assert second.limits == first.limits
    assert second.file_digest == first.file_digest


def test_changes_without_a_file_are_not_taken_up_where_there_is_one_now() -> None:
    kept = LimitsInForce(7, "", b"", (LimitsOverride("tenants.acme.weight", "3"),))
    alone, filed = effective_limits(), effective_limits()
    alone.go_on_from(kept, has_read_file=True)
    filed.take_file(FILE)
    filed.go_on_from(kept, has_read_file=True)
    assert (alone.limits.tenants_by_name["acme"].weight, filed.limits.tenants_by_name["acme"].weight) == (3, 2)


def test_gateways_are_told_digests_lanes_and_the_default_tenant() -> None:
    reservations = effective_limits()
    reservations.take_file(FILE + "\n[default_tenant]\nlanes = ['standard']\n")
    rules = decode(AccessRules, encode(reservations.access_rules(9)))
    assert (rules.epoch, rules.default_lane, rules.default_tenant) == (9, "standard", "default")
    assert rules.lanes == ("interactive", "standard", "batch")
    acme, default = rules.tenants
    assert (acme.name, acme.key_digests, acme.lanes) == ("acme", (bytes.fromhex(DIGEST),), ("batch",))
    assert acme.isolates_cache
    assert default.lanes == ("standard",)
    assert (acme.requests_per_min, default.requests_per_min) == (60, 0)


def test_more_keys_than_a_message_holds_are_refused_before_anything_changes() -> None:
    digests = ", ".join(f'"{number:064x}"' for number in range(40_000))
    reservations = effective_limits()
    with pytest.raises(InvalidRequest, match="too many tenants and keys for one message"):
        reservations.take_file(f"[tenants.acme]\napi_key_digests = [{digests}]\n")
    assert reservations.limits == CoreLimits()


def test_changes_that_the_next_scheduler_could_not_read_are_refused_before_anything_changes() -> None:
    reservations = effective_limits()
    reservations.change([("lanes.batch.weight", "2")])
    digests = ", ".join(f'"{number:064x}"' for number in range(16))
    with pytest.raises(InvalidRequest, match="put it into the limits file") as refused:
        reservations.change([("tenants.acme.api_key_digests", f"[{digests}]")])
    assert field_of(refused) == "tenants.acme.api_key_digests"
    many = [(f"tenants.t{number:04}.weight", "2 # " + "x" * 1000) for number in range(1000)]
    with pytest.raises(InvalidRequest, match="too many changes at run time"):
        reservations.change(many)
    assert dict(reservations.overrides) == {"lanes.batch.weight": "2"}
    kept = decode(LimitsInForce, encode(reservations.limits_in_force(7)))
    follower = effective_limits()
    follower.go_on_from(kept, has_read_file=True)
    assert follower.limits == reservations.limits


@pytest.mark.parametrize("value", ["9" * 400, "9" * 5000, "[" * 2000], ids=["too large", "too long", "too deep"])
def test_a_value_that_python_cannot_take_is_refused_as_any_other(value: str) -> None:
    reservations = effective_limits()
    with pytest.raises(InvalidRequest):
        reservations.take_file(f"[tenants.acme]\nweight = {value}\n")
    with pytest.raises(InvalidRequest):
        reservations.change([("tenants.acme.weight", value)])
    assert reservations.limits == CoreLimits()


@pytest.mark.parametrize("value", ['"sk-secret"', '["sk-secret"]', "[1234567890]"])
def test_a_key_that_stands_where_its_digest_should_is_not_repeated(value: str) -> None:
    with pytest.raises(InvalidRequest, match="api_key_digests") as refused:
        effective_limits().take_file(f"[tenants.acme]\napi_key_digests = {value}\n")
    assert value.strip('[]"') not in refused.value.message


@pytest.mark.parametrize("text", ["fcfs", "srtf:max_age=0.5", "ltr"])
def test_a_policy_is_written_as_it_is_read(text: str) -> None:
    assert str(PolicySpec.parse(text)) == text
    assert PolicySpec.parse(text).make().name == text.split(":", maxsplit=1)[0]


@pytest.mark.parametrize("text", ["", "nonsense", "fcfs:x=1", "srtf:max_age=nan", "srtf:max_age"])
def test_a_policy_that_cannot_be_is_refused_and_changes_nothing(text: str) -> None:
    reservations = effective_limits("ltr")
    with pytest.raises(ValueError, match="policy"):
        reservations.choose_policy(text)
    assert str(reservations.policy) == "ltr"
