"""What the core wants done. The shell does it; asking a gateway is repeated until it answers or is gone."""

from dataclasses import dataclass

from weir.bus.messages import Grant, Revoke


@dataclass(frozen=True, slots=True)
class SendGrant:
    """Tell the gateway that its request may start: it has left its queue, and the booking is made."""

    gateway_id: str
    grant: Grant


@dataclass(frozen=True, slots=True)
class SendRevoke:
    """Tell the gateway that its request is given up. It is in no queue, and nothing is booked for it any more."""

    gateway_id: str
    revoke: Revoke


@dataclass(frozen=True, slots=True)
class EnteredQueue:
    """A request waits now."""

    request_id: str
    lane: str


@dataclass(frozen=True, slots=True)
class LeftQueue:
    """A request left its queue without a word to its gateway; `outcome` says why."""

    request_id: str
    outcome: str


Command = SendGrant | SendRevoke | EnteredQueue | LeftQueue
