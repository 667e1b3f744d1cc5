"""The one mutable record of a sequence in an engine, changed by four methods and nowhere else.

    tokens      | prompt ........ | output 0, 1, ... |
    positions   0 ........ num_computed ....... num_tokens
                |-- in pages ---|-- to be computed --|

The keys and values of [0, num_computed) are in `block_table`'s pages. The last drawn token is never computed when it
ends the sequence. A token is drawn from the logits of position num_tokens - 1, that is when num_computed reaches
num_tokens.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum

from weir.engine.messages import Arrival, EndReason, SequenceKey, SequenceLog
from weir.engine.plan import ChunkPlan, SampleSpec
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.kv.record import SequenceFacts

OpenLog = Callable[[int], SequenceLog]
"""The record of a slot, to be begun."""


class Stage(Enum):
    """Where a sequence is in this worker."""

    WAITING = "waiting"
    RUNNING = "running"
    HANDING_OFF = "handing_off"


@dataclass(slots=True, eq=False)
class Sequence:
    """Reads are free; only the methods below change it, and `stage`, `stalled_since_s`, `is_cancelled` are its
    batcher's."""

    facts: SequenceFacts
    token_ids: list[int]
    slot: int | None = None
    log: SequenceLog | None = None
    block_table: tuple[int, ...] = ()
    num_computed: int = 0
    stage: Stage = Stage.WAITING
    stalled_since_s: float | None = None
    is_cancelled: bool = False
    is_sound: bool = True
    """False: something went wrong where it was computed, so nobody else is to use what is in its pages."""
    key: SequenceKey = field(init=False)

    def __post_init__(self) -> None:
        self.key = SequenceKey(self.facts.request_id, self.facts.attempt)

    @classmethod
    def of_arrival(cls, arrival: Arrival) -> "Sequence":
        return cls(
            facts=arrival.facts,
            token_ids=[*arrival.facts.prompt_token_ids, *arrival.output_token_ids],
            slot=arrival.slot,
            log=arrival.log,
            block_table=arrival.block_table,
            num_computed=arrival.num_computed_tokens,
        )

    @property
    def prefix_seed(self) -> bytes:
        """Under which its pages may serve others; empty: they may not."""
        return self.facts.prefix_seed if self.is_sound else b""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.facts.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    def num_missing_pages(self, num_ahead: int) -> int:
        """Pages to add before the next `num_ahead` positions can be computed."""
        return max(0, num_pages_for(self.num_computed + num_ahead) - len(self.block_table))

    def place(self, slot: int, log: SequenceLog, page_ids: Seq[int]) -> None:
        """Gives a new sequence its slot and its pages after the cached prefix, and publishes that much of its record."""
        block_table = (*self.block_table, *page_ids)
        log.begin(self.facts)
        log.set_block_table(block_table)
        log.publish(self.num_computed)
        self.slot, self.log, self.block_table = slot, log, block_table

    def grow(self, page_id: int) -> None:
        """Adds a page; the next publish makes it count."""
        assert self.log is not None, "a sequence without a record has no pages"
        self.log.append_page(page_id)
        self.block_table += (page_id,)

    def plan_chunk(self, max_tokens: int) -> ChunkPlan:
        """The next at most `max_tokens` positions; draws a token when they reach the end. Changes nothing."""
        assert self.slot is not None, "only a placed sequence can be computed"
        end = min(self.num_computed + max_tokens, self.num_tokens)
        is_last = end == self.num_tokens
        return ChunkPlan(
            slot=self.slot,
            start=self.num_computed,
            token_ids=tuple(self.token_ids[self.num_computed : end]),
            block_table=self.block_table[: num_pages_for(end)],
            sample=SampleSpec(self.facts.sampling, self.num_output_tokens) if is_last else None,
        )

    def record_chunk(self, end: int, token_id: int | None) -> None:
        """Positions up to `end` are computed, and `token_id` was drawn after them. Published when this returns."""
        assert self.log is not None, "only a placed sequence can be computed"
        if token_id is not None:
            self.log.append_token(token_id)
            self.token_ids.append(token_id)
        self.num_computed = end
        self.log.publish(end)

    def end_reason(self, max_context_tokens: int) -> EndReason | None:
        """Why the last drawn token ends the sequence, or None when it goes on."""
        if self.num_output_tokens == 0:
            return None
        if self.token_ids[-1] in self.facts.stop.stop_token_ids:
            return EndReason.STOP
        if self.num_output_tokens >= self.facts.stop.max_tokens or self.num_tokens >= max_context_tokens:
            return EndReason.LENGTH
        return None

    def check_integrity(self) -> list[str]:
        """What is wrong with the ranges above, in sentences."""
        room = len(self.block_table) * PAGE_TOKENS
        if 0 <= self.num_computed <= min(room, self.num_tokens):
            return []
        return [f"{self.key.request_id}: {self.num_computed} of {self.num_tokens} tokens in room for {room}"]
