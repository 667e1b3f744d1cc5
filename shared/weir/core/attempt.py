"""The epoch of a request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """Ordered by (dispatch, adoption): a re-dispatch raises the first, an adoption the second.

    Whoever holds state of a request refuses everything that carries an older attempt than the newest one seen.
    """

    dispatch: int = 1
    adoption: int = 0
