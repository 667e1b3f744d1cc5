"""Every message survives the wire, and nothing that comes over it can raise anything but MalformedMessage."""

import dataclasses
import enum
import importlib
import pkgutil
import types
from collections.abc import Iterator, Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weir.bus
import weir_scheduler.counters_store
from weir.bus import codec, messages
from weir.bus.audit import AuditBounds
from weir.bus.codec import MalformedMessage, MessageTooLarge, check_version, decode, encode, version_headers
from weir.bus.configuration import DIGEST_BYTES, AccessRules, LaneCaps, TenantAccess
from weir.bus.keys import BODY_DIGEST_BYTES, SEED_BYTES
from weir.bus.messages import (
    Ack,
    Cancel,
    Finish,
    Grant,
    Held,
    HeldRequest,
    Outcome,
    Placement,
    Submit,
    SubmitReply,
    WorkerRecord,
)
from weir.bus.prefix_news import PrefixChanged
from weir.bus.protocol import BusMessage, KvEntry
from weir.bus.subjects import Subjects
from weir.core.caps import RequestCaps

NEVER_SENT = (BusMessage, KvEntry, Subjects)
SUBMIT = Submit("r1", "gateway-0-1", "m", "interactive", "t", 10, 20, 0)
PLACEMENT = Placement(1, "p1", "127.0.0.1:1", "d1", "127.0.0.1:2", 3)


def dataclasses_of_the_bus() -> Iterator[type[Any]]:
    """Public ones that the bus or the scheduler's store define or send; a new message is among them by itself."""
    inside = [importlib.import_module(f"weir.bus.{module.name}") for module in pkgutil.iter_modules(weir.bus.__path__)]
    for module in (*inside, weir_scheduler.counters_store):
        for name, value in vars(module).items():
            is_own = getattr(value, "__module__", "").startswith(("weir.bus.", "weir_scheduler.", "weir.core."))
            if isinstance(value, type) and dataclasses.is_dataclass(value) and is_own and not name.startswith("_"):
                yield value


MESSAGE_TYPES = sorted(set(dataclasses_of_the_bus()).difference(NEVER_SENT), key=lambda one: one.__name__)
LANES = ("interactive", "standard", "batch")


@st.composite
def access_rules(draw: st.DrawFn) -> AccessRules:
    """Tenants and the default name lanes that there are."""
    lanes = draw(st.lists(st.sampled_from(LANES), min_size=1, unique=True))
    tenant = st.builds(
        TenantAccess,
        name=values_of(str),
        key_digests=CONSTRAINED_FIELDS["key_digests"],
        lanes=st.lists(st.sampled_from(lanes), unique=True).map(tuple),
        isolates_cache=st.booleans(),
        caps=values_of(RequestCaps),
    )
    tenants = st.lists(tenant, max_size=3).map(tuple)
    return AccessRules(
        draw(values_of(int)),
        tuple(lanes),
        draw(st.sampled_from(lanes)),
        draw(values_of(str)),
        draw(tenants),
        draw(values_of(tuple[LaneCaps, ...])),
        draw(CONSTRAINED_FIELDS["key_digests"]),
        draw(st.booleans()),
    )


CONSTRAINED_FIELDS: Mapping[str, st.SearchStrategy[Any]] = {
    "arena_id": st.text("abzAZ09_-", min_size=1, max_size=128),
    "key_digests": st.lists(st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES), max_size=3).map(tuple),
    "body_digest": st.binary(min_size=BODY_DIGEST_BYTES, max_size=BODY_DIGEST_BYTES),
    "seed": st.binary(min_size=SEED_BYTES, max_size=SEED_BYTES),
}
CONSTRAINED_TYPES: Mapping[type[Any], st.SearchStrategy[Any]] = {
    AccessRules: access_rules(),
    AuditBounds: st.builds(AuditBounds, max_bytes=st.integers(1, 1 << 44), max_age_s=st.floats(1, 10 * 366 * 86_400)),
}
"""What a message checks itself. One that is drawn in vain lacks its fields here."""


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    scalars: dict[Any, st.SearchStrategy[Any]] = {
        str: st.text(max_size=24),
        bool: st.booleans(),
        int: st.integers(0, codec.MAX_INT),
        float: st.floats(0, allow_nan=False, allow_infinity=False),
        bytes: st.binary(max_size=24),
    }
    if annotation in scalars:
        return scalars[annotation]
    if get_origin(annotation) is tuple:
        return st.lists(values_of(get_args(annotation)[0]), max_size=3).map(tuple)
    if get_origin(annotation) in (Union, types.UnionType):
        return st.one_of(*(st.none() if a is types.NoneType else values_of(a) for a in get_args(annotation)))
    if issubclass(annotation, enum.Enum):
        return st.sampled_from(annotation)
    if annotation in CONSTRAINED_TYPES:
        return CONSTRAINED_TYPES[annotation]
    hints = get_type_hints(annotation)
    return st.builds(annotation, **{name: CONSTRAINED_FIELDS.get(name, values_of(hints[name])) for name in hints})


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def test_the_list_of_message_types_is_not_empty() -> None:
    assert {Submit, Held, Grant, Finish, PrefixChanged, AccessRules} <= set(MESSAGE_TYPES)


@pytest.mark.parametrize("message_type", MESSAGE_TYPES)
@settings(max_examples=25)
@given(data=st.data())
def test_every_message_comes_back_as_it_was(message_type: type[Any], data: st.DataObject) -> None:
    message = data.draw(values_of(message_type))
    assert decode(message_type, encode(message)) == message


@pytest.mark.parametrize("message_type", MESSAGE_TYPES)
@settings(max_examples=25)
@given(payload=st.binary(max_size=200))
def test_random_bytes_are_malformed_and_nothing_worse(message_type: type[Any], payload: bytes) -> None:
    """But for a map, should no field of the message have to be in it."""
    try:
        message = decode(message_type, payload)
    except MalformedMessage:
        return
    assert isinstance(msgpack.unpackb(payload), dict)
    assert message == message_type()


@pytest.mark.parametrize("message_type", MESSAGE_TYPES)
@settings(max_examples=25)
@given(
    data=st.data(),
    junk=plain_values | st.text(max_size=8) | st.lists(st.text(max_size=8) | st.binary(max_size=8), max_size=2),
)
def test_one_field_of_a_random_kind_is_named_or_was_right(
    message_type: type[Any], data: st.DataObject, junk: object
) -> None:
    plain = msgpack.unpackb(encode(data.draw(values_of(message_type))))
    name = data.draw(st.sampled_from(sorted(plain)))
    plain[name] = junk
    named: str | None = None
    try:
        message = decode(message_type, msgpack.packb(plain))
    except MalformedMessage as error:
        named = error.field
    if named is None:
        again: object = msgpack.unpackb(encode(message))[name]
        # an integer may stand for a float, which has 53 bits
        assert again == (float(junk) if isinstance(again, float) and isinstance(junk, int) else junk) or isinstance(
            junk, dict | list
        )
    elif not hasattr(message_type, "__post_init__"):
        assert named.startswith(name)
    else:  # a check of the message itself may be of several fields, and names one of them or the whole
        assert named == "" or named.partition("[")[0].partition(".")[0] in plain


@given(plain=plain_values)
def test_random_messagepack_never_raises_anything_else(plain: object) -> None:
    for message_type in MESSAGE_TYPES:
        try:
            decode(message_type, msgpack.packb(plain))
        except MalformedMessage:
            continue


def test_a_missing_field_is_named_with_its_path() -> None:
    plain = msgpack.unpackb(encode(Held("g", 1, (HeldRequest(SUBMIT, PLACEMENT), HeldRequest(SUBMIT, None)))))
    del plain["requests"][1]["submit"]["max_tokens"]
    with pytest.raises(MalformedMessage, match=r"^requests\[1\]\.submit\.max_tokens: is missing$"):
        decode(Held, msgpack.packb(plain))


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("max_tokens", True, "expected an integer, found bool"),
        ("max_tokens", 1.0, "expected an integer, found float"),
        ("max_tokens", -1, "-1 is outside"),
        ("max_tokens", 2**63, "is outside"),
        ("tenant", None, "expected a string, found nothing"),
        ("tenant", b"raw", "expected a string, found bytes"),
        ("tenant", "x" * 1025, "1025 characters, at most 1024"),
    ],
)
def test_a_wrong_value_is_described(name: str, value: object, problem: str) -> None:
    plain = msgpack.unpackb(encode(SUBMIT)) | {name: value}
    with pytest.raises(MalformedMessage, match=problem) as caught:
        decode(Submit, msgpack.packb(plain))
    assert caught.value.field == name


def test_an_unknown_enum_value_lists_the_known_ones() -> None:
    plain = msgpack.unpackb(encode(Finish("r", "g", 1, Outcome.FINISHED, 3))) | {"outcome": "exploded"}
    with pytest.raises(MalformedMessage, match="'exploded' is none of finished, cancelled, failed"):
        decode(Finish, msgpack.packb(plain))


def test_an_unknown_field_is_ignored_and_a_missing_default_is_filled_in() -> None:
    newer = msgpack.packb({"epoch": 3, "queued": True, "colour": "blue"})
    assert decode(SubmitReply, newer) == SubmitReply(epoch=3, queued=True)


def test_two_messages_in_one_payload_are_malformed() -> None:
    with pytest.raises(MalformedMessage):
        decode(Ack, encode(Ack(1)) + encode(Ack(2)))


def test_deep_nesting_is_malformed() -> None:
    with pytest.raises(MalformedMessage):
        decode(Ack, b"\x91" * 100_000 + b"\x00")


def test_a_message_over_the_limit_is_refused_on_both_sides() -> None:
    with pytest.raises(MessageTooLarge, match="send it in parts"):
        encode(Held("g", 1, (HeldRequest(SUBMIT, PLACEMENT),) * 5000))
    with pytest.raises(MalformedMessage, match="at most"):
        decode(Cancel, b"\x00" * (codec.MAX_MESSAGE_BYTES + 1))


def test_a_long_list_of_held_requests_goes_out_in_parts_that_fit() -> None:
    requests = tuple(HeldRequest(dataclasses.replace(SUBMIT, request_id=f"{i:032x}"), PLACEMENT) for i in range(1201))
    parts = messages.split_held("g", 7, requests)
    assert [(held.part, held.num_parts) for held in parts] == [(0, 3), (1, 3), (2, 3)]
    assert sum((decode(Held, encode(held)).requests for held in parts), ()) == requests
    assert messages.split_held("g", 8, ()) == (Held("g", 8, ()),)


def test_another_version_is_refused_and_silence_is_this_one() -> None:
    check_version(version_headers())
    check_version({})
    with pytest.raises(MalformedMessage, match="header Weir-Version"):
        check_version({codec.VERSION_HEADER: "1"})


def test_a_value_that_a_message_itself_refuses_is_malformed() -> None:
    record = dict.fromkeys(("worker_id", "role", "model", "address", "host_id"), "x") | dict.fromkeys(
        ("max_context_tokens", "page_tokens", "num_arena_pages", "max_num_seqs", "num_running", "num_waiting"), 1
    )
    names = ("base_ms", "prefill_token_ms", "prefill_pair_ms", "decode_sequence_ms", "context_token_ms")
    cost = dict.fromkeys(names, 1.0) | {"base_ms": -1.0}
    with pytest.raises(MalformedMessage, match=r"cost\.base_ms: -1"):
        decode(WorkerRecord, msgpack.packb(record | {"cost": cost}))
