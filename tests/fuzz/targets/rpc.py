"""Messages between Weir's own processes, by protobuf: a gateway's commands to a worker, a worker's calls of its
arena, the options of a request."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from tests.fuzz.choices import NUMBERS, Choices, edited
from tests.fuzz.target import Check, Target, simple
from tests.unit.transfer.conftest import World
from tests.unit.transfer.test_core_deaths import COMPUTED, Scene
from tests.unit.worker.rig import VOCAB_SIZE, start_command
from tests.unit.worker.test_bad_input import check
from weir.core.errors import InvalidRequest, Overloaded
from weir.kv.arena.ownership import NotOwned
from weir.rpc.conversions import attempt_from_pb, options_from_pb
from weir.wire.v1 import arena_pb2, inference_pb2, worker_pb2
from weir_transfer.messages import ArenaRefusal
from weir_transfer.server import _chains_from_pb, _hand_off_from_pb, _registration_from_pb

_INTEGERS = [one for one in NUMBERS if isinstance(one, int)]


def fill(choices: Choices, message: Any, depth: int = 3) -> Any:
    """Some of its fields, with values that their types take."""
    for field in message.DESCRIPTOR.fields:
        if choices.byte() % 3 == 0 or (field.message_type and not depth):
            continue
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            _set(choices, message, field, depth)
    return message


def _set(choices: Choices, message: Any, field: FieldDescriptor, depth: int) -> None:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        value[choices.below(VOCAB_SIZE + 1)] = choices.pick(NUMBERS)
    elif hasattr(value, "append"):
        for _ in range(choices.below(4)):
            fill(choices, value.add(), depth - 1) if field.message_type else value.append(_scalar(choices, field))
    elif field.message_type is not None:
        value.SetInParent()
        fill(choices, value, depth - 1)
    else:
        setattr(message, field.name, _scalar(choices, field))


def _scalar(choices: Choices, field: FieldDescriptor) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return choices.pick((COMPUTED[0], b"".join(COMPUTED[:3]), choices.some_bytes(20)))
        case FieldDescriptor.CPPTYPE_STRING:
            return choices.pick(("a" * 32, "r1", "decode", "prefill", "digest", choices.text()))
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return choices.pick(NUMBERS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return bool(choices.below(2))
        case _:
            return choices.below(64) if choices.below(4) else choices.pick(_INTEGERS)


def check_command(data: bytes) -> None:
    choices = Choices(data)
    if choices.below(2):
        request = fill(choices, worker_pb2.ServeRequest())
    else:
        request = worker_pb2.ServeRequest(start=start_command("decode-0-00000000"))
        fill(choices, request.start)
    raw = request.SerializeToString()
    request = worker_pb2.ServeRequest.FromString(edited(choices, raw) if choices.below(4) == 1 else raw)
    if request.HasField("start"):
        request.start.sampling.ClearField("grammar")  # for which the record that `check` writes has no annex
    check(request)


def check_options(data: bytes) -> None:
    options = options_from_pb(fill(Choices(data), inference_pb2.RequestOptions()))
    hash(options)


@contextlib.contextmanager
def _arena_calls() -> Iterator[Check]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:

        def call(data: bytes) -> None:
            choices = Choices(data)
            path = Path(folder) / "arena"
            path.unlink(missing_ok=True)
            world = World(path, adoption_wait_ms=1000)
            scene = Scene.begin(world)
            try:
                while not choices.is_over:
                    with contextlib.suppress(ArenaRefusal, NotOwned, Overloaded, ValueError):
                        _call(choices, world, choices.pick((scene.prefill, scene.decode)))
                    own_mistakes = ("block table", "pins it less")  # it gave back what its record still names
                    errors = world.core.integrity_errors()
                    assert all(any(words in error for words in own_mistakes) for error in errors), errors
            finally:
                world.segment.close()

        yield call


def _call(choices: Choices, world: World, attachment: Any) -> None:
    """As the servicer of the arena makes it of a message. ValueError: it is answered with INVALID_ARGUMENT."""
    core, own = world.core, (attachment.lease_id, attachment.number)
    match choices.below(6):
        case 0:
            core.attach(
                _registration_from_pb(fill(choices, arena_pb2.Register(page_bytes=4096, model_digest="digest")))
            )
        case 1:
            request = fill(choices, arena_pb2.AcquireRequest())
            core.acquire(*own, request.num_pages, request.num_slots)
        case 2:
            released = fill(choices, arena_pb2.ReleaseRequest())
            core.release(*own, _chains_from_pb(released), list(released.slots), list(released.match_ids))
        case 3:
            core.hand_off(*own, _hand_off_from_pb(fill(choices, arena_pb2.HandOffRequest(request_id="r1"))))
        case 4:
            attempt_from_pb(fill(choices, arena_pb2.HandOffRequest()).attempt)
            core.tick()
            core.adopt_orphans()
        case _:
            core.end_lease(choices.below(4))


TARGETS = (
    Target("worker_commands", simple(check_command), (InvalidRequest, DecodeError), max_bytes=256, ci_examples=200),
    Target("options", simple(check_options), (InvalidRequest,), max_bytes=256),
    Target("arena_calls", _arena_calls, (), max_bytes=128),
)
