"""What a step decides (plain data) and what comes out of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from weir.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Draw output token number `output_index` (from 0) from the logits of the chunk's last token."""

    params: SamplingParams
    output_index: int


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One sequence's share of a step: compute the keys, values and hidden states of positions [start, end).

    positions   0 ........ start ............ end
                |-- in pages --|-- token_ids --|        end = start + len(token_ids)

    `block_table` names the pages of positions [0, end), in order: page i holds [16 i, 16 i + 16).
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    sample: SampleSpec | None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class PageCopy:
    """One page of the arena and its place in the swap file."""

    page_id: int
    place: int


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """Pages to copy before the forward pass: first those that leave, then those that come back."""

    outs: tuple[PageCopy, ...] = ()
    ins: tuple[PageCopy, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.outs or self.ins)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass, and the pages that are swapped before it. Either may be empty."""

    step: int
    chunks: tuple[ChunkPlan, ...]
    swap: SwapPlan = SwapPlan()

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The drawn token of each chunk that has a `sample`, by slot.

    `failed_places`: places of the swap file that had no room for a page that leaves, or whose bytes were not those of
    the page that should come back.
    """

    token_ids: Mapping[int, int]
    failed_places: frozenset[int] = frozenset()


class ModelRunner(Protocol):
    """The only part of a step that touches tensors. Called from the engine's thread only."""

    def run(self, plan: StepPlan) -> StepResult:
        """Writes the chunks' keys and values into their pages, and samples. The order of chunks does not matter."""
        ...
