"""How the scheduler has a running request go on at another host: its gateway does it, and its list of held requests
says what came of it."""

from dataclasses import dataclass

from weir.bus.messages import Placement


@dataclass(frozen=True, slots=True)
class Migrate:
    """A request that decodes is to go on under this placement, for which there is room reserved, without its client
    noticing. A repeated one changes nothing."""

    epoch: int
    request_id: str
    placement: Placement
    """Its dispatch is 0: the gateway numbers it."""
    pages_address: str
    """HOST:PORT of the `Pages` of the arena where it runs now."""


@dataclass(frozen=True, slots=True)
class MigrateReply:
    """Whether the gateway has begun. From then on its list of held requests says `is_migrating`, until the request runs
    there, or it has given the migration up: then it goes on where it was."""

    accepted: bool
    refusal: str = ""
