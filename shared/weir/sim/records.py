"""Sequence records of a simulated memory: nothing is written, but who is in which slot is known."""

from collections.abc import Sequence

from weir.core.logprobs import TokenLogprobs
from weir.kv.record import SequenceFacts


class SimRecord:
    """Implements `weir.engine.messages.SequenceLog`. The modelled model asks it whose chunk it computes."""

    __slots__ = ("facts",)

    def __init__(self) -> None:
        self.facts: SequenceFacts | None = None

    def begin(self, facts: SequenceFacts) -> None:
        self.facts = facts

    def set_block_table(self, page_ids: Sequence[int]) -> None:
        """Nobody reads it: nothing is adopted in a simulation."""

    def append_page(self, page_id: int) -> None:
        """As above."""

    def append_token(self, token_id: int) -> None:
        """As above."""

    def keep_logprobs(self, output_index: int, logprobs: TokenLogprobs) -> None:
        """As above."""

    def publish(self, num_computed_tokens: int) -> None:
        """As above."""

    def drop_pages(self, num_kept: int) -> None:
        """As above."""

    def clear(self) -> None:
        self.facts = None
