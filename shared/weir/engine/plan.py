"""What a step decides (plain data) and what comes out of it.

What there is one of for every token is a named tuple: a frozen dataclass takes four times as long to make.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from weir.core.sampling import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class TokenHistory:
    """The tokens of a sequence before the one to be sampled, int32: first the prompt's, then the output's."""

    token_ids: NDArray[np.int32]
    num_prompt_tokens: int


class TokenMask(Protocol):
    """The tokens that a sequence's grammar allows next. Found out while the step runs."""

    def allowed(self) -> NDArray[np.uint32]:
        """Waits for it. Bit i % 32 of word i // 32: whether token i may come. Not to be changed.

        Raises InternalError.
        """
        ...


class SampleSpec(NamedTuple):
    """Sample output token number `output_index` (from 0) from the logits of the chunk's last token.

    None of `masked_token_ids` may be sampled, and only what `mask` allows; where both would leave nothing, `mask` alone
    counts. `history` is there if the parameters have penalties, `mask` if they have a grammar.
    """

    params: SamplingParams
    output_index: int
    masked_token_ids: tuple[int, ...] = ()
    history: TokenHistory | None = None
    mask: TokenMask | None = None

    def allowed(self) -> NDArray[np.uint32] | None:
        """Of `mask` and `masked_token_ids` together, as `TokenMask.allowed` has it; None without a mask."""
        if self.mask is None:
            return None
        words = self.mask.allowed()
        if not self.masked_token_ids:
            return words
        ids = np.array(self.masked_token_ids)
        left = words.copy()
        np.bitwise_and.at(left, ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))
        return left if left.any() else words


@dataclass(frozen=True, slots=True)
class ScoreSpec:
    """Score the prompt's own tokens: how likely is `next_token_ids[i]` after the chunk's token i?

    One entry for each token of the chunk, except for the prompt's last one, after which the prompt has none. The
    `num_top` most likely tokens are named too.
    """

    next_token_ids: tuple[int, ...]
    num_top: int


SAMPLED_BEFORE = -1
"""Instead of a token id: the one that the step before this one samples for the same slot."""


class ChunkPlan(NamedTuple):
    """One sequence's share of a step: compute the keys, values and hidden states of positions [start, end).

    positions   0 ........ start ............ end
                |-- in pages --|-- token_ids --|        end = start + len(token_ids)

    `block_table` names the pages of positions [0, end), in order: page i holds [16 i, 16 i + 16). Those before the one
    that its first query reads first (`weir.kv.geometry.first_page_read`) may be somebody else's: with windows in all
    layers they are given back. The only token of a step that is launched before the one before it has ended is
    `SAMPLED_BEFORE`.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    sample: SampleSpec | None
    score: ScoreSpec | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Between one page of the arena and one slot of the swap file."""

    page_id: int
    swap_slot: int


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """Pages to copy before the forward pass: first those that leave, then those that come back."""

    outs: tuple[PageCopy, ...] = ()
    ins: tuple[PageCopy, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.outs or self.ins)


NO_SWAP = SwapPlan()


class StepLoad(NamedTuple):
    """What a step computed, in the terms of `weir.core.cost`: a chunk of one token counts as a decode."""

    num_prefill_tokens: int = 0
    num_prefill_pairs: float = 0.0
    """Each token of a prompt chunk with each one before it."""
    num_decodes: int = 0
    num_context_tokens: int = 0
    """Summed over the decodes: positions that each attends to."""


NO_LOAD = StepLoad()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass, and the pages that are swapped before it. Either may be empty."""

    step: int
    chunks: tuple[ChunkPlan, ...]
    swap: SwapPlan = NO_SWAP

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def load(self) -> StepLoad:
        num_prefill_tokens = num_decodes = num_context_tokens = 0
        num_pairs = 0.0
        for chunk in self.chunks:
            num_tokens = len(chunk.token_ids)
            if num_tokens == 1:
                num_decodes += 1
                num_context_tokens += chunk.start + 1
            else:
                num_prefill_tokens += num_tokens
                num_pairs += num_tokens * (chunk.start + num_tokens / 2)
        return StepLoad(num_prefill_tokens, num_pairs, num_decodes, num_context_tokens)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The sampled token of each chunk that has a `sample`, by slot.

    `failed_swap_slots`: slots of the swap file that had no room for a page that leaves, or whose bytes were not those
    of the page that should come back.
    """

    token_ids: Mapping[int, int]
    failed_swap_slots: frozenset[int] = frozenset()
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    """By slot, of the sampled tokens whose parameters ask for it."""
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """By slot, of each chunk that has a `score`: one entry for each of its `next_token_ids`."""
    mean_others: float = 0.0
    """Other workers of the machine that computed meanwhile, as far as the runner shares its cores with them."""


class ModelRunner(Protocol):
    """The only part of a step that touches tensors. Called from the engine's thread only."""

    def run(self, plan: StepPlan) -> StepResult:
        """Writes the chunks' keys and values into their pages, and samples. The order of chunks does not matter."""
        ...


@runtime_checkable
class LaunchingRunner(ModelRunner, Protocol):
    """One that goes on by itself, on a device that the host need not wait for."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Starts a step. The function returns, or raises, once all that it writes is written.

        At most one other step has been launched by then and not waited for. The chunks of such a plan may have
        `SAMPLED_BEFORE` for the slots that the other step samples. Steps are waited for in the order of launching.
        """
        ...
