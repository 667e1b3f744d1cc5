"""Between the wire and the core."""

from weir.core.attempt import Attempt
from weir.kv.messages import Claims, HandedOff
from weir.kv.process import ProcessIdentity
from weir.wire.v1 import arena_pb2, types_pb2
from weir_transfer.core import HandOffOrder
from weir_transfer.lease_keeper import Registration


def registration_from_pb(register: arena_pb2.Register) -> Registration:
    return Registration(
        worker_id=register.worker_id,
        role=register.role,
        process=ProcessIdentity(register.pid, register.pid_start_ticks),
        page_bytes=register.page_bytes,
        model_digest=register.model_digest,
        lease_id=register.lease_id,
        claims=Claims(
            page_ids=tuple(register.held_page_ids),
            slots=tuple(register.held_slots),
            handing_off_slots=tuple(register.handing_off_slots),
        ),
    )


def order_from_pb(request: arena_pb2.HandOffRequest) -> HandOffOrder:
    return HandOffOrder(
        slot=request.slot,
        request_id=request.request_id,
        attempt=Attempt(request.attempt.dispatch, request.attempt.adoption),
        to_worker_id=request.to_worker_id,
    )


def handed_off_to_pb(sequence: HandedOff) -> arena_pb2.SequenceHandedOff:
    return arena_pb2.SequenceHandedOff(
        slot=sequence.slot,
        slot_generation=sequence.slot_generation,
        request_id=sequence.request_id,
        attempt=types_pb2.Attempt(dispatch=sequence.attempt.dispatch, adoption=sequence.attempt.adoption),
    )
