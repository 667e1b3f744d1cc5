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
class StepPlan:
    """One forward pass."""

    step: int
    chunks: tuple[ChunkPlan, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The drawn token of each chunk that has a `sample`, by slot."""

    token_ids: Mapping[int, int]


class ModelRunner(Protocol):
    """The only part of a step that touches tensors. Called from the engine's thread only."""

    def run(self, plan: StepPlan) -> StepResult:
        """Writes the chunks' keys and values into their pages, and samples. The order of chunks does not matter."""
        ...
