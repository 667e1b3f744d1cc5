"""What certificates say of who holds them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.rpc.identities import CERTIFIED_ROLES, CertifiedIdentity, CertifiedRole, try_parse_identity

_NAMES = st.text("abcXYZ019._-", min_size=1, max_size=40).filter(lambda name: name not in (".", ".."))
_INSTANCES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True)


@given(_INSTANCES, st.sampled_from(CERTIFIED_ROLES), _NAMES)
def test_what_is_written_is_read(instance: str, role: CertifiedRole, name: str) -> None:
    identity = CertifiedIdentity(instance, role, name)
    assert try_parse_identity(identity.uri) == identity


@given(st.text(max_size=80))
def test_other_uris_are_of_nobody(uri: str) -> None:
    assert try_parse_identity(uri) is None


@pytest.mark.parametrize(
    "uri",
    [
        "spiffe://weir.internal/weir/a/decode",
        "spiffe://weir.internal/weir/a/decode/h/more",
        "spiffe://weir.internal/weir/a/boss/h",
        "spiffe://weir.internal/weir/A/decode/h",
        "spiffe://weir.internal/weir/-a/decode/h",
        "spiffe://weir.internal/other/a/decode/h",
        "spiffe://weir.internal/weir/a/decode/..",
        "https://weir.internal/weir/a/decode/h",
        "spiffe://weir.internal/weir/a/decode/h\n",
    ],
)
def test_what_is_almost_one_is_none(uri: str) -> None:
    assert try_parse_identity(uri) is None


def test_workers_of_both_roles_are_one_party() -> None:
    names = {role: CertifiedIdentity("a", role, "h").dns_name for role in CERTIFIED_ROLES}
    assert names["prefill"] == names["decode"] == "worker.a.weir.internal"
    assert len(set(names.values())) == len(CERTIFIED_ROLES) - 1


def test_an_id_with_a_mark_is_of_one_identity() -> None:
    one, other = CertifiedIdentity("a", "gateway", "h"), CertifiedIdentity("a", "gateway", "i")
    assert one.owns(f"gateway-0-1a2b3c4d{one.mark}")
    assert not other.owns(f"gateway-0-1a2b3c4d{one.mark}")
    assert not one.owns("gateway-0-1a2b3c4d")


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"instance": "A"}, "instance"),
        ({"instance": "a_b"}, "instance"),
        ({"name": "a/b"}, "name"),
        ({"name": ""}, "name"),
    ],
)
def test_what_can_stand_in_no_certificate_is_refused_by_name(wrong: dict[str, str], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} "):
        CertifiedIdentity(**{"instance": "a", "role": "decode", "name": "h", **wrong})  # type: ignore[arg-type]
