"""What the service refuses, beside `weir.kv.arena.ownership.NotOwned` and `weir.core.errors.Overloaded`."""


class ArenaRefusal(Exception):
    """Nothing was changed. The message is for the log of the worker that asked."""


class AttachRefused(ArenaRefusal):
    """The worker cannot have this lease, now or later."""


class StaleAttachment(ArenaRefusal):
    """The call belongs to an attachment that has ended: attach again, then repeat it."""


class RecordMismatch(ArenaRefusal):
    """The slot's record is not of the sequence that was named."""


class ReceiverAway(ArenaRefusal):
    """The receiver of a hand-off is silent or reconnects; it may be back in a moment."""


class ReceiverGone(ArenaRefusal):
    """The receiver of a hand-off has no lease."""
