"""What the service refuses, beside `weir.kv.ownership.NotOwned` and `weir.core.errors.Overloaded`."""


class Refusal(Exception):
    """Nothing was changed. The message is for the log of the worker that asked."""


class AttachRefused(Refusal):
    """The worker cannot have this lease, now or later."""


class StaleAttachment(Refusal):
    """The call belongs to an attachment that has ended: attach again, then repeat it."""


class RecordMismatch(Refusal):
    """The slot's record is not of the sequence that was named."""


class ReceiverAway(Refusal):
    """The receiver of a hand-off is silent or reconnects; it may be back in a moment."""


class ReceiverGone(Refusal):
    """The receiver of a hand-off has no lease."""
