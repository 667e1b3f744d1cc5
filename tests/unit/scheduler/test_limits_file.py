"""The file of lanes and tenants: what it says is taken, and what is wrong in it is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.errors import InvalidRequest
from weir.scheduling.limits import CoreLimits, LaneLimits, TenantLimits
from weir.scheduling.limits_file import MAX_FILE_BYTES, format_limits, parse_limits

FILE = """
default_lane = "fast"
lane_order = "weighted"
[lanes.fast]
max_queued = 10
max_wait_s = 5
guaranteed_share = 0.25
itl_slo_ms = 50
[lanes.slow]
max_queued = 20
max_wait_s = 60.5
weight = 0.5
max_batch = 4
worker_group = "spare"
[tenants.team-a]
weight = 3
tokens_per_min = 1_000
isolates_cache = true
api_key_digests = ["%s"]
lanes = ["slow"]
[default_tenant]
requests_per_min = 60
""" % ("ab" * 32)


def test_a_file_says_lanes_in_order_tenants_and_the_default_one() -> None:
    limits = parse_limits(FILE, CoreLimits(max_prefills=3))
    assert limits.lanes == (
        LaneLimits("fast", 10, 5.0, guaranteed_share=0.25, itl_slo_ms=50),
        LaneLimits("slow", 20, 60.5, weight=0.5, max_batch=4, worker_group="spare"),
    )
    digests = ("ab" * 32,)
    team = TenantLimits("team-a", 3.0, 0.0, 1000.0, isolates_cache=True, api_key_digests=digests, lanes=("slow",))
    assert limits.tenants == (team,)
    assert (limits.default_lane, limits.lane_order, limits.max_prefills) == ("fast", "weighted", 3)
    assert limits.tenant("team-a") == team
    assert limits.tenant("nobody") == limits.tenant("") == TenantLimits("default", requests_per_min=60.0)
    assert [limits.lane_priority(name) for name in ("fast", "slow")] == [1, 0]


def test_what_the_file_leaves_out_stays_as_it_was() -> None:
    base = parse_limits(FILE, CoreLimits())
    changed = parse_limits("lent_share = 0.5", base)
    assert (changed.lanes, changed.tenants, changed.lent_share) == (base.lanes, base.tenants, 0.5)
    assert parse_limits("", base) == base


def test_limits_written_as_a_file_read_as_themselves() -> None:
    limits = parse_limits(FILE, CoreLimits())
    assert parse_limits(format_limits(limits), CoreLimits()) == limits


LANE = "[lanes.standard]\nmax_queued = 1\nmax_wait_s = 1\n"


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("lanes = 3", "lanes", "each begun with [lanes.NAME]"),
        ("[[lanes]]\na = 1", "lanes", "must be tables"),
        ("[lanes]\na = 1", "lanes.a", "must be a table"),
        ("default_tenant = 1", "default_tenant", "must be a table"),
        ("wieght = 1", "wieght", "unknown; known are default_lane"),
        (LANE + "max_bacth = 1", "lanes.standard.max_bacth", "unknown; known are max_queued"),
        ("[lanes.a]\nmax_queued = 3", "lanes.a.max_wait_s", "missing, must be a number"),
        (LANE + LANE, "file", "not TOML"),
        ("[lanes]", "file", "lanes : name at least one"),
        (LANE.replace("standard", "Gold"), "lanes.Gold", "lane 'Gold': a name is 1 to 32"),
        (LANE + 'weight = "2"', "lanes.standard.weight", "'2', must be a number"),
        (LANE + "max_batch = 1.5", "lanes.standard.max_batch", "1.5, must be a whole number"),
        (LANE + "max_batch = true", "lanes.standard.max_batch", "True, must be a whole number"),
        (LANE + "weight = nan", "lanes.standard", "lane standard: weight nan: must be in [0.001, 1000]"),
        (LANE + "weight = 0", "lanes.standard", "weight 0.0: must be"),
        (LANE + "guaranteed_share = 1.1", "lanes.standard", "guaranteed_share 1.1: must be in [0, 1]"),
        (LANE + "ageing_s = -1", "lanes.standard", "ageing_s -1.0: must be in [0, 86400]"),
        (LANE + "ttft_slo_ms = -1", "lanes.standard", "ttft_slo_ms -1"),
        (LANE + 'worker_group = "a b"', "lanes.standard", "worker_group 'a b'"),
        ('default_lane = "vip"', "default_lane", "'vip': is none of interactive, standard, batch"),
        ('lane_order = "random"', "lane_order", "'random', must be one of strict, weighted"),
        ("lent_share = 2", "lent_share", "2.0: must be in [0, 1]"),
        ("slot_overcommit = -1", "slot_overcommit", "-1.0: must be in [0, 10]"),
        ("max_queued = 0", "max_queued", "0: must be in"),
        ("[tenants._]", "tenants._", "tenant '_': a name is"),
        ("[tenants.default]", "file", "tenant default: named 2 times"),
        ("[tenants.a]\nrequests_per_min = inf", "tenants.a", "requests_per_min inf: must be in"),
        ("[tenants.a]\nmax_in_flight = -2", "tenants.a", "max_in_flight -2"),
        ('[tenants.a]\nlanes = ["gold"]', "file", "tenant a: lanes 'gold', is none of"),
        ("a = ", "file", "not TOML"),
        ("# " + "x" * MAX_FILE_BYTES, "file", "over 4194304 bytes"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_path_value_and_limit(text: str, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_limits(text, CoreLimits())
    (violation,) = caught.value.violations
    assert violation.field == field
    assert words in violation.description


def test_guarantees_of_all_lanes_are_at_most_everything() -> None:
    lanes = "".join(f"[lanes.l{i}]\nmax_queued = 1\nmax_wait_s = 1\nguaranteed_share = 0.4\n" for i in range(3))
    with pytest.raises(InvalidRequest, match=r"lanes have 1.2 in all, must be at most 1"):
        parse_limits('default_lane = "l0"\n' + lanes, CoreLimits())


def test_a_key_instead_of_its_digest_is_refused_and_not_repeated() -> None:
    text = '[tenants.a]\napi_key_digests = ["sk-secret"]'
    with pytest.raises(InvalidRequest, match="give the key's SHA-256") as caught:
        parse_limits(text, CoreLimits())
    assert "sk-secret" not in caught.value.message


def test_two_tenants_cannot_have_one_key() -> None:
    tenant = '[tenants.%s]\napi_key_digests = ["' + "0" * 64 + '"]\n'
    with pytest.raises(InvalidRequest, match="belongs to 2 tenants"):
        parse_limits(tenant % "a" + tenant % "b", CoreLimits())


ZEROS = [64 * "0"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('admin_key_digests = ["sk-secret"]', "admin_key_digests: one is not 64 hex digits"),
        ('admin_key_digests = "sk-secret"', "what is there, must be a list"),
        (f"admin_key_digests = {ZEROS}\n[tenants.a]\napi_key_digests = {ZEROS}\n", "is a tenant's"),
    ],
)
def test_operators_keys_are_digests_and_their_own(text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        parse_limits(text, CoreLimits())
    assert "sk-secret" not in caught.value.message


def test_operators_keys_are_said_by_the_file_that_is_written() -> None:
    limits = CoreLimits(admin_key_digests=("ab" * 32,))
    assert parse_limits(format_limits(limits), CoreLimits()) == limits


@given(st.text(max_size=200))
def test_any_text_is_limits_or_a_named_error(text: str) -> None:
    try:
        limits = parse_limits(text, CoreLimits())
    except InvalidRequest:
        return
    assert isinstance(limits, CoreLimits)
