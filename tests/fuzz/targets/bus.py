"""Messages of the bus: whatever MessagePack says, a message or MalformedMessage; nearly right ones most of all."""

from typing import Any

import msgpack

from tests.fuzz.choices import Choices, edited
from tests.fuzz.target import Target, simple
from tests.unit.bus.test_codec import MESSAGE_TYPES, PLACEMENT, SUBMIT
from weir.bus.codec import MAX_MESSAGE_BYTES, MalformedMessage, decode, encode
from weir.bus.messages import Grant

_MAX_NEST = 5000
_VALID = (encode(SUBMIT), encode(PLACEMENT), encode(Grant(1, "r", PLACEMENT)))


def _plain_message(choices: Choices, message_type: type[Any]) -> dict[str, Any]:
    """Its own fields, with values of all kinds."""
    return {name: choices.value(3) for name in message_type.__dataclass_fields__ if choices.below(8)}


def check_message(data: bytes) -> None:
    choices = Choices(data)
    message_type = choices.pick(MESSAGE_TYPES)
    match choices.below(4):
        case 0:
            payload = choices.rest()
        case 1:
            nest = choices.below(_MAX_NEST)
            payload = choices.pick((b"\x91", b"\x81\xa1a", b"\xdd\x00\x00\x00\x01")) * nest + choices.rest()
        case 2:
            payload = edited(choices, choices.pick(_VALID))
        case _:
            try:
                payload = msgpack.packb(_plain_message(choices, message_type), unicode_errors="surrogatepass")
            except OverflowError:  # no MessagePack has it
                return
    message = decode(message_type, payload)
    assert decode(message_type, encode(message)) == message
    assert len(payload) <= MAX_MESSAGE_BYTES


TARGETS = (Target("bus_messages", simple(check_message), (MalformedMessage,), ci_examples=300),)
