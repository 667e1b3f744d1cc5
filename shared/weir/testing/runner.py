"""A model that is a hash: fast, deterministic, and wrong as soon as a page is."""

import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from weir.core.sampling import SamplingParams, TokenLogprobs
from weir.engine.plan import SAMPLED_BEFORE, ChunkPlan, SampleSpec, ScoreSpec, StepPlan, StepResult, TokenHistory
from weir.kv.geometry import PAGE_TOKENS, first_page_read
from weir.model.rows import SampledRow
from weir.model.sampler import sample_step, scan_of, token_logprobs

_GARBAGE = -1
_POSITION_FACTOR = 1_000_003
"""More than there are tokens."""


class HashRunner:
    """Writes a number for each position into the pages, and samples tokens from what it then reads there.

    So a token depends on every page of its sequence: a wrong block table, a page that somebody else wrote to and a
    chunk that was left out all give other tokens than `reference_tokens`. With a window it depends on those that are
    seen, and a step fails that would read another's. `on_run` is called first in each step, to wait or to raise.
    """

    def __init__(
        self,
        num_pages: int,
        vocab_size: int,
        on_run: Callable[[StepPlan], None] | None = None,
        memory: npt.NDArray[np.int64] | None = None,
        window: int | None = None,
    ) -> None:
        """`memory` [num_pages, PAGE_TOKENS] may be shared with another runner; without it there is one of its own.
        `window`: positions that a query sees at most."""
        if memory is None:
            memory = np.full((num_pages, PAGE_TOKENS), _GARBAGE, np.int64)
        self._memory = memory
        self._window = window
        self._vocab_size = vocab_size
        self._on_run = on_run
        self.num_runs = 0
        self.mean_others = 0.0
        """What each result says."""

    @property
    def pages(self) -> npt.NDArray[np.uint8]:
        """The pages' bytes, [num_pages, page_bytes]; a view."""
        return self._memory.view(np.uint8)

    def run(self, plan: StepPlan) -> StepResult:
        self.num_runs += 1
        if self._on_run is not None:
            self._on_run(plan)
        for chunk in plan.chunks:
            if self._window is not None:
                self._check_read(chunk, self._window)
            for position, token_id in enumerate(chunk.token_ids, chunk.start):
                page_id = chunk.block_table[position // PAGE_TOKENS]
                self._memory[page_id, position % PAGE_TOKENS] = _written(position, token_id)
        results = [self._sampled(chunk) for chunk in plan.chunks if chunk.sample is not None]
        return StepResult(
            {slot: token_id for result in results for slot, token_id in result.token_ids.items()},
            logprobs={slot: logprobs for result in results for slot, logprobs in result.logprobs.items()},
            prompt_logprobs={chunk.slot: self._scored(chunk, chunk.score) for chunk in plan.chunks if chunk.score},
            mean_others=self.mean_others,
        )

    def spoil(self, page_ids: tuple[int, ...]) -> None:
        """What happens to pages that their owner gave away: somebody else writes."""
        self._memory[list(page_ids)] = _GARBAGE

    def _sampled(self, chunk: ChunkPlan) -> StepResult:
        assert chunk.sample is not None, "nothing is sampled after this chunk"
        return _draw(self._read(chunk), chunk.slot, chunk.sample, self._vocab_size)

    def _scored(self, chunk: ChunkPlan, score: ScoreSpec) -> tuple[TokenLogprobs, ...]:
        ends = range(chunk.start + 1, chunk.start + 1 + len(score.next_token_ids))
        logits = np.stack([_logits(self._read(chunk, end), self._vocab_size) for end in ends])
        return token_logprobs(logits, score.next_token_ids, score.num_top)

    def _read(self, chunk: ChunkPlan, end: int | None = None) -> npt.NDArray[np.int64]:
        """What the query before `end` sees, by default the chunk's last."""
        end = chunk.end if end is None else end
        first = 0 if self._window is None else max(0, end - self._window)
        return self._memory[list(chunk.block_table)].reshape(-1)[first:end]

    def _check_read(self, chunk: ChunkPlan, window: int) -> None:
        """Kernels read whole blocks, more than is seen: there must be what was computed for these positions."""
        first = first_page_read(chunk.start, window)
        before = self._memory[list(chunk.block_table[first:])].reshape(-1)[: chunk.start - first * PAGE_TOKENS]
        positions = np.arange(first * PAGE_TOKENS, chunk.start)
        assert (before // _POSITION_FACTOR == positions + 1).all(), f"slot {chunk.slot} reads what is not its own"


class LaunchingHashRunner(HashRunner):
    """Launches steps as a slow device does: each is computed as late as it may be, when it is waited for.

    Fails when a launched step writes to a page that was given away, when more than two are launched, and when they are
    waited for out of order.
    """

    def __init__(
        self,
        num_pages: int,
        vocab_size: int,
        on_run: Callable[[StepPlan], None] | None = None,
        memory: npt.NDArray[np.int64] | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__(num_pages, vocab_size, on_run, memory, window)
        self._launched: deque[StepPlan] = deque()
        self._sampled_before: Mapping[int, int] = {}
        self.num_launched_ahead = 0

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        self.num_launched_ahead += bool(self._launched)
        self._launched.append(plan)
        assert len(self._launched) <= 2, "one step runs, one is ahead of it"
        return lambda: self._finish(plan)

    def spoil(self, page_ids: tuple[int, ...]) -> None:
        for plan in self._launched:
            for chunk in plan.chunks:
                pages = {chunk.block_table[position // PAGE_TOKENS] for position in range(chunk.start, chunk.end)}
                assert pages.isdisjoint(page_ids), f"slot {chunk.slot} of step {plan.step} is still to be written"
        super().spoil(page_ids)

    def _finish(self, plan: StepPlan) -> StepResult:
        assert self._launched.popleft() is plan, "steps end in order"
        try:
            result = self.run(replace(plan, chunks=tuple(map(self._resolved, plan.chunks))))
        except BaseException:
            self._sampled_before = {}
            raise
        self._sampled_before = result.token_ids
        return result

    def _resolved(self, chunk: ChunkPlan) -> ChunkPlan:
        if chunk.token_ids != (SAMPLED_BEFORE,):
            return chunk
        return chunk._replace(token_ids=(self._sampled_before[chunk.slot],))


def reference_tokens(
    prompt_token_ids: tuple[int, ...],
    params: SamplingParams,
    num_tokens: int,
    vocab_size: int,
    *,
    stop_token_ids: tuple[int, ...] = (),
    min_tokens: int = 0,
    window: int | None = None,
) -> list[int]:
    """The first `num_tokens` tokens of a request that runs alone, without pages, and does not stop."""
    token_ids = list(prompt_token_ids)
    for output_index in range(num_tokens):
        first = 0 if window is None else max(0, len(token_ids) - window)
        written = np.array([_written(*entry) for entry in enumerate(token_ids[first:], first)], np.int64)
        history = TokenHistory(np.array(token_ids, np.int32), len(prompt_token_ids))
        masked = stop_token_ids if output_index < min_tokens else ()
        result = _draw(written, 0, SampleSpec(params, output_index, masked, history), vocab_size)
        token_ids.append(result.token_ids[0])
    return token_ids[len(prompt_token_ids) :]


def _written(position: int, token_id: int) -> int:
    return (position + 1) * _POSITION_FACTOR + token_id


def _draw(written: npt.NDArray[np.int64], slot: int, spec: SampleSpec, vocab_size: int) -> StepResult:
    """With the real sampler where its parameters say more than seed and temperature."""
    params = spec.params
    if not spec.masked_token_ids and params == SamplingParams(params.temperature, seed=params.seed):
        token_id = (zlib.crc32(written.tobytes()) ^ (params.seed * 31 + spec.output_index)) % vocab_size
        return StepResult({slot: token_id})
    return sample_step(scan_of(_logits(written, vocab_size)[None]), [SampledRow(slot, 0, spec)])


def _logits(written: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(zlib.crc32(written.tobytes())).normal(0, 3, vocab_size).astype(np.float32)
