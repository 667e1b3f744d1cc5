"""A model that is a hash: fast, deterministic, and wrong as soon as a page is."""

import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from weir.core.sampling import SamplingParams
from weir.engine.plan import StepPlan, StepResult
from weir.kv.geometry import PAGE_TOKENS

_GARBAGE = -1


class HashRunner:
    """Writes a number for each position into the pages, and draws tokens from what it then reads there.

    So a token depends on every page of its sequence: a wrong block table, a page that somebody else wrote to and a
    chunk that was left out all give other tokens than `reference_tokens`. `on_run` is called first in each step, to
    wait or to raise.
    """

    def __init__(
        self,
        num_pages: int,
        vocab_size: int,
        on_run: Callable[[StepPlan], None] | None = None,
        memory: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """`memory` [num_pages, PAGE_TOKENS] may be shared with another runner; without it there is one of its own."""
        if memory is None:
            memory = np.full((num_pages, PAGE_TOKENS), _GARBAGE, np.int64)
        self._memory = memory
        self._vocab_size = vocab_size
        self._on_run = on_run
        self.num_runs = 0

    @property
    def pages(self) -> npt.NDArray[np.uint8]:
        """The pages' bytes, [num_pages, page_bytes]; a view."""
        return self._memory.view(np.uint8)

    def run(self, plan: StepPlan) -> StepResult:
        self.num_runs += 1
        if self._on_run is not None:
            self._on_run(plan)
        for chunk in plan.chunks:
            for position, token_id in enumerate(chunk.token_ids, chunk.start):
                page_id = chunk.block_table[position // PAGE_TOKENS]
                self._memory[page_id, position % PAGE_TOKENS] = _written(position, token_id)
        return StepResult(
            {
                chunk.slot: _draw(
                    self._memory[list(chunk.block_table)].reshape(-1)[: chunk.end],
                    chunk.sample.params,
                    chunk.sample.output_index,
                    self._vocab_size,
                )
                for chunk in plan.chunks
                if chunk.sample is not None
            }
        )

    def spoil(self, page_ids: tuple[int, ...]) -> None:
        """What happens to pages that their owner gave away: somebody else writes."""
        self._memory[list(page_ids)] = _GARBAGE


def reference_tokens(
    prompt_token_ids: tuple[int, ...], params: SamplingParams, num_tokens: int, vocab_size: int
) -> list[int]:
    """The first `num_tokens` tokens of a request that runs alone, without pages."""
    token_ids = list(prompt_token_ids)
    for output_index in range(num_tokens):
        written = np.array([_written(*entry) for entry in enumerate(token_ids)], np.int64)
        token_ids.append(_draw(written, params, output_index, vocab_size))
    return token_ids[len(prompt_token_ids) :]


def _written(position: int, token_id: int) -> int:
    return (position + 1) * 1_000_003 + token_id


def _draw(written: npt.NDArray[np.int64], params: SamplingParams, output_index: int, vocab_size: int) -> int:
    return (zlib.crc32(written.tobytes()) ^ (params.seed * 31 + output_index)) % vocab_size
