"""Whose a key is: decided by compare and set in the keys' bucket, from what is written there and what its owner says.

        absent ── claim ──> RUNNING of a gateway ── its end ──> FINISHED or ENDED ── claim, as a new request ──> RUNNING
                              └─ claim, after its gateway died: the same request, under higher dispatches ──┘

Between any two of these steps the gateway may die. What it has written is then a claim of a dead gateway, which anybody
takes over. Whoever writes second of two learns it from the bucket, and looks again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from weir.bus.keys import DISPATCHES_PER_GATEWAY, AskHolder, Holding, KeyRecord, KeyStatus
from weir.bus.protocol import KeyConflict
from weir.core.errors import AlreadyExists, FieldViolation, InvalidRequest, Unavailable

BUSY_RETRY_S = 1.0
_MAX_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class KeyedBody:
    """What a client wants under its key. `key_field` and `resume_field` are its names for what it sent."""

    key_name: str
    body_digest: bytes
    seed: bytes
    resume_from: int | None
    key_field: str
    resume_field: str

    @property
    def takes_over(self) -> bool:
        """It says where it goes on, so that it has left the connection that it had before."""
        return self.resume_from is not None


@dataclass(frozen=True, slots=True)
class Claim:
    """What this gateway has written, and the revision that it has: nobody has written since, as long as that stands."""

    record: KeyRecord
    revision: int


class KeyPort(Protocol):
    """The bucket and the other gateways. Each method may raise Unavailable."""

    async def try_get(self, key_name: str) -> Claim | None: ...

    async def write(self, key_name: str, record: KeyRecord, revision: int) -> int:
        """Compare and set; 0: there must be none. Returns the new revision. Raises KeyConflict."""
        ...

    async def ask(self, gateway_id: str, question: AskHolder) -> Holding | None:
        """None: there is no such gateway any more."""
        ...


async def claim(body: KeyedBody, gateway_id: str, keys: KeyPort, new_request_id: Callable[[], str]) -> Claim:
    """Makes the key this gateway's. Raises AlreadyExists for another body, InvalidRequest for a place beyond the end of
    the answer, Unavailable while another connection or gateway has it."""
    for _ in range(_MAX_ROUNDS):
        found = await keys.try_get(body.key_name)
        holding: Holding | None = Holding.FREE
        if found is not None:
            check_body(body, found.record)
            if found.record.status is KeyStatus.RUNNING and found.record.gateway_id != gateway_id:
                holding = await keys.ask(found.record.gateway_id, AskHolder(body.key_name, body.takes_over))
        if holding is Holding.HELD:
            raise busy(body)
        record = successor(None if found is None else found.record, body, gateway_id, new_request_id(), holding)
        try:
            return Claim(record, await keys.write(body.key_name, record, 0 if found is None else found.revision))
        except KeyConflict:
            continue
    raise busy(body)


def check_body(body: KeyedBody, record: KeyRecord) -> None:
    """Raises AlreadyExists, or InvalidRequest."""
    check_same(body, record.body_digest)
    is_beyond = body.resume_from is not None and body.resume_from > record.num_output_tokens
    if record.status is KeyStatus.FINISHED and is_beyond:
        raise beyond_end(body, record.num_output_tokens)


def successor(
    record: KeyRecord | None, body: KeyedBody, gateway_id: str, request_id: str, holding: Holding | None
) -> KeyRecord:
    """What follows `record`. A request that its gateway died with goes on under its id, with dispatches above all that
    it may have used, so that whoever still has the old one lets it go. What has ended is a new request: scheduler and
    workers take no more of the old one. Either way with the seed that it had."""
    if record is None:
        return KeyRecord(body.body_digest, body.seed, request_id, gateway_id, 1)
    if holding is None:
        first_dispatch = record.first_dispatch + DISPATCHES_PER_GATEWAY
        return KeyRecord(record.body_digest, record.seed, record.request_id, gateway_id, first_dispatch)
    return KeyRecord(record.body_digest, record.seed, request_id, gateway_id, 1)


def check_same(body: KeyedBody, body_digest: bytes) -> None:
    """Raises AlreadyExists."""
    if body.body_digest != body_digest:
        message = f"{body.key_field}: another request was sent under this key; send that one again, or use a new key"
        raise AlreadyExists(body.key_field, message)


def busy(body: KeyedBody) -> Unavailable:
    where = f"to have it here, say with {body.resume_field} from where"
    return Unavailable(
        f"{body.key_field}: another connection is getting the answer to this request; try again, or, {where}",
        retry_after_s=BUSY_RETRY_S,
    )


def beyond_end(body: KeyedBody, num_output_tokens: int) -> InvalidRequest:
    description = f"is {body.resume_from}; the answer has {num_output_tokens} tokens"
    return InvalidRequest([FieldViolation(body.resume_field, description)])
