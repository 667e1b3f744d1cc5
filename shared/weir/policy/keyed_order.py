"""An Order whose queues sort by a fixed key and share nothing."""

from weir.policy.keyed_queue import KeyedQueue, KeyOf
from weir.policy.seams import OrderQueue, Waiting


class KeyedOrder:
    """`key_of` says the place of a request; its first number is the rank of the request where ranks matter."""

    def __init__(self, key_of: KeyOf) -> None:
        self._key_of = key_of

    def new_queue(self) -> OrderQueue:
        return KeyedQueue(self._key_of)

    def rank(self, request: Waiting) -> float:
        return next(iter(self._key_of(request)), 0.0)

    def finished(self, request: Waiting, num_output_tokens: int, now_s: float) -> None:
        """Nothing is learnt."""
