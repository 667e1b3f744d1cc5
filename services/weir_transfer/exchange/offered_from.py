"""Where the pages of an offer come from, as its answers say it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weir.kv.movers.source import OfferedPage
from weir.wire.v1 import pages_pb2


@dataclass(frozen=True, slots=True)
class OfferedFrom:
    """`stream_address`: HOST:PORT of page streams. `memory_socket_path`: of the device's memory; empty: it is on
    none."""

    stream_address: str
    arena_id: str
    memory_socket_path: str

    def answer(
        self, transfer_id: bytes, ticket: bytes, pages: Iterable[tuple[OfferedPage, bytes]], *, is_last: bool = False
    ) -> pages_pb2.OfferResponse:
        """`pages`: each with its content hash; empty: that is told otherwise."""
        return pages_pb2.OfferResponse(
            transfer_id=transfer_id,
            ticket=ticket,
            stream_address=self.stream_address,
            pages=[
                pages_pb2.OfferedPage(
                    generation=page.generation, checksum=page.checksum, page_hash=page_hash, page_id=page.page_id
                )
                for page, page_hash in pages
            ],
            is_last=is_last,
            memory_socket_path=self.memory_socket_path,
            arena_id=self.arena_id,
        )


def which_are_checked(num_offered: int, *, maps_memory: bool) -> Callable[[int], bool]:
    """Of pages that are appended to an offer of `num_offered`, by their index: all of those that go over a stream, and
    the offer's first one."""
    return lambda index: not maps_memory or num_offered + index == 0
