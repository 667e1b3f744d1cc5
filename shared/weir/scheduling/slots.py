"""Decode slots: how many requests may be booked on a worker, and who may be booked over that number."""

from bisect import bisect_right
from collections.abc import Sequence
from math import ceil

Seat = tuple[int, float]
"""(minus the lane's priority, rank inside the lane): who comes first among those on a worker."""


def has_slot(seat: Seat, seats: Sequence[Seat], max_num_seqs: int, slot_overbooking: float) -> bool:
    """Whether a worker that computes `max_num_seqs` sequences takes one more beside the sorted `seats`.

    When all slots are booked, it takes one that outranks somebody there, who rests then; the number of those who may
    rest is bounded.
    """
    if len(seats) < max_num_seqs:
        return True
    if len(seats) >= max_num_seqs + ceil(max_num_seqs * slot_overbooking):
        return False
    return bisect_right(seats, seat) < max_num_seqs
