"""What the core wants done. The shell does it; asking a gateway is repeated until it answers or is gone."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from weir.bus.messages import Grant, RefusalReason, Revoke
from weir.bus.migration import Migrate

WORKER_RETRY_MS = 2000
"""A worker that died is back, or another has registered, after about this long."""


class Refusal(NamedTuple):
    """Why, in a word and in a sentence, and milliseconds until a retry makes sense (0: never)."""

    reason: RefusalReason
    message: str
    retry_after_ms: int = 0
    bound: str = ""
    """Of a tenant, that is reached: by its key in the limits file."""


@dataclass(frozen=True, slots=True)
class SendGrant:
    """Tell the gateway that its request may start: it has left its queue, and its reservation is made."""

    gateway_id: str
    grant: Grant


@dataclass(frozen=True, slots=True)
class SendRevoke:
    """Tell the gateway that its request is given up. It is in no queue, and nothing is reserved for it any more."""

    gateway_id: str
    revoke: Revoke


@dataclass(frozen=True, slots=True)
class SendMigrate:
    """Ask the gateway to have its request go on at another host. There is room reserved for it there."""

    gateway_id: str
    migrate: Migrate


@dataclass(frozen=True, slots=True)
class EnteredQueue:
    """A request waits now."""

    request_id: str
    lane: str


@dataclass(frozen=True, slots=True)
class LeftQueue:
    """A request left its queue without a message to its gateway; `outcome` says why."""

    request_id: str
    outcome: str


Command = SendGrant | SendRevoke | SendMigrate | EnteredQueue | LeftQueue


class CommandQueue:
    """What is to be done by whoever runs the core, and how often what was decided."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.counts: Counter[str] = Counter()
        self._commands: list[Command] = []

    def add(self, command: Command) -> None:
        self._commands.append(command)

    def take(self) -> tuple[Command, ...]:
        """Everything since the last call."""
        if not self._commands:
            return ()
        commands = tuple(self._commands)
        self._commands.clear()
        return commands
