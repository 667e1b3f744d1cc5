"""Sequence records of a simulated memory: nothing is written, but who is in which slot is known."""

from collections import Counter
from collections.abc import Sequence

from weir.core.logprobs import TokenLogprobs
from weir.kv.records.record import SequenceParams


class SimRecord:
    """Implements `weir.engine.messages.SequenceLog`. The modelled model asks it whose chunk it computes."""

    __slots__ = ("_preemptions", "params")

    def __init__(self, preemptions: Counter[str]) -> None:
        """`preemptions`: by request, counted here."""
        self.params: SequenceParams | None = None
        self._preemptions = preemptions

    def begin(self, params: SequenceParams) -> None:
        self.params = params

    def set_block_table(self, page_ids: Sequence[int]) -> None:
        """Nobody asks for it: nothing is adopted in a simulation."""

    def append_page(self, page_id: int) -> None:
        """As above."""

    def append_token(self, token_id: int) -> None:
        """As above."""

    def keep_logprobs(self, output_index: int, logprobs: TokenLogprobs) -> None:
        """As above."""

    def publish(self, num_computed_tokens: int) -> None:
        """As above."""

    def drop_pages(self, num_kept: int) -> None:
        """A sequence gives its pages up when it is preempted, and then alone."""
        del num_kept
        if self.params is not None:
            self._preemptions[self.params.request_id] += 1

    def clear(self) -> None:
        self.params = None
