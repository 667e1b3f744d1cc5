"""What gateways ask the scheduler to make in JetStream.

Nobody else makes streams there: whoever may make one can have the server repeat what comes into it on any subject.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weir.bus.endpoint import BusEndpoint
from weir.bus.protocol import BusRefused

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_MAKE_TIMEOUT_S = 1.5
_MAX_PROBLEM_CHARS = 512


@dataclass(frozen=True, slots=True)
class MakeResponses:
    """A bucket of this tenant's kept answers."""

    tenant: str


@dataclass(frozen=True, slots=True)
class StoreReply:
    """The answer: it is there, unless there is a problem."""

    problem: str = ""

    @classmethod
    def refused(cls, problem: object) -> "StoreReply":
        return cls((str(problem) or "no answer in time")[:_MAX_PROBLEM_CHARS])


async def ask_to_make(endpoint: BusEndpoint, subject: str, message: "DataclassInstance") -> None:
    """Raises BusError."""
    reply = await endpoint.ask(subject, message, StoreReply, timeout_s=_MAKE_TIMEOUT_S)
    if reply.problem:
        raise BusRefused(reply.problem)
