"""Prompts get their slot and all their pages at once, so that two prompts never hold half of what each needs."""

from weir.engine.memory.pages import PagePool
from weir.engine.sequence import OpenLog, Sequence


class Unrecordable(Exception):
    """A sequence has facts that a record cannot hold; nothing was taken for it."""


class PageClaimer:
    """Places sequences that start here, for every batcher that takes prompts."""

    def __init__(self, pool: PagePool, open_log: OpenLog) -> None:
        self._pool = pool
        self._open_log = open_log

    def try_place(self, sequence: Sequence) -> bool:
        """Slot, pages and a published record. False: too little is free now, and nothing was taken.

        Raises Unrecordable.
        """
        num_pages = sequence.num_missing_pages(sequence.num_uncomputed)
        if num_pages > self._pool.num_free_pages:
            return False
        slot = self._pool.try_take_slot()
        if slot is None:
            return False
        page_ids = self._pool.try_take(num_pages)
        assert page_ids is not None, "counted above"
        try:
            sequence.place(slot, self._open_log(slot), page_ids)
        except ValueError as error:
            self._pool.put_back_unused(slot, page_ids)
            raise Unrecordable(f"cannot be recorded: {error}") from error
        return True
