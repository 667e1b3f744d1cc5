"""Messages of `weir.v1.Arena` to those of the core and back. Hashes of a wrong length raise ValueError."""

from weir.core.process import ProcessIdentity
from weir.kv.messages import Claims, HandedOff, PageChain
from weir.kv.prefixes.hashing import split_hashes
from weir.rpc.conversions import attempt_from_pb, attempt_to_pb
from weir.wire.v1 import arena_pb2
from weir_transfer.messages import HandOffRequest, LeaseRegistration, MatchRequest


def registration_from_pb(register: arena_pb2.Register) -> LeaseRegistration:
    return LeaseRegistration(
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


def hand_off_from_pb(request: arena_pb2.HandOffRequest) -> HandOffRequest:
    return HandOffRequest(
        slot=request.slot,
        request_id=request.request_id,
        attempt=attempt_from_pb(request.attempt),
        to_worker_id=request.to_worker_id,
        hashes=split_hashes(request.page_hashes),
    )


def match_from_pb(request: arena_pb2.MatchRequest) -> MatchRequest:
    return MatchRequest(split_hashes(request.page_hashes), request.num_pages, request.num_slots)


def chain_from_pb(chain: arena_pb2.PageChain) -> PageChain:
    return PageChain(tuple(chain.page_ids), split_hashes(chain.page_hashes))


def chains_from_pb(request: arena_pb2.ReleaseRequest) -> list[PageChain]:
    """Pages that hold nothing of use are a chain without hashes."""
    return [PageChain(tuple(request.page_ids)), *(chain_from_pb(chain) for chain in request.chains)]


def handed_off_to_pb(sequence: HandedOff) -> arena_pb2.SequenceHandedOff:
    return arena_pb2.SequenceHandedOff(
        slot=sequence.slot,
        slot_generation=sequence.slot_generation,
        request_id=sequence.request_id,
        attempt=attempt_to_pb(sequence.attempt),
    )
