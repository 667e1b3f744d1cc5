"""Draws tokens from logits. A row's draw depends on its own logits, parameters, tokens and output index only.

The order is vLLM's: `logit_bias` is added, tokens of prompt and output get the repetition penalty, tokens of the output
the frequency and presence penalties, what may not be drawn is masked; then temperature, top-k, top-p and min-p (Hugging
Face's order; vLLM's V1 engine applies min-p before the other two, which differs only where top-p is used too). Greedy
draws see bias, penalties and mask as well. Log-probabilities are those of the logits before all that.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weir.core.errors import InternalError
from weir.core.logprobs import TokenLogprobs
from weir.core.sampling import SamplingParams
from weir.engine.plan import SampleSpec, ScoreSpec, StepResult, TokenHistory
from weir.ops.sampling.cpu import draw as draw_row
from weir.ops.sampling.cpu import penalize, uniform_of
from weir.ops.sampling.cpu_order import count_above, most_likely
from weir.ops.sampling.cpu_scan import BLOCK, NOT_A_NUMBER, num_scan_blocks, scan_rows, sum_exp

Logits = npt.NDArray[np.float32]

MASKED = np.float32(-3e38)
"""The logit of a token that may not be drawn. Finite: should all be masked, one is drawn still."""
_MAX_SCORED_ROWS = 64


class Scan(NamedTuple):
    """What one pass over rows of logits, fp32 [rows, vocabulary], finds (`weir.ops.sampling.cpu_scan`)."""

    logits: Logits
    block_maxima: Logits
    highest: Logits
    argmax: npt.NDArray[np.int32]

    def first_rows(self, num_rows: int) -> "Scan":
        rows = slice(num_rows)
        return Scan(self.logits[rows], self.block_maxima[rows], self.highest[rows], self.argmax[rows])


def scan_of(logits: Logits) -> Scan:
    num_rows, num_tokens = logits.shape
    block_maxima = np.empty((num_rows, num_scan_blocks(num_tokens)), np.float32)
    scan = Scan(logits, block_maxima, np.empty(num_rows, np.float32), np.empty(num_rows, np.int32))
    scan_rows(*scan)
    return scan


def sample_rows(logits: Logits, specs: Sequence[SampleSpec]) -> list[int]:
    """`logits` fp32 [rows, vocabulary], C-contiguous, one spec a row; they are not changed.

    Raises:
        InternalError: a logit is NaN or infinite; no token of the step may be used then.
    """
    return _draw_rows(scan_of(logits), specs)


def sample_step(logits: Logits, slots: Sequence[int], specs: Sequence[SampleSpec]) -> StepResult:
    """As `sample_rows`, by slot, with the log-probabilities that the specs ask for."""
    return sample_scanned(scan_of(logits), slots, specs)


def sample_scanned(scan: Scan, slots: Sequence[int], specs: Sequence[SampleSpec]) -> StepResult:
    """`sample_step` of rows that were looked through already."""
    token_ids = _draw_rows(scan, specs)
    logprobs = {
        slot: _logprobs_of(scan, row, token_id, spec.params.logprobs)
        for row, (slot, token_id, spec) in enumerate(zip(slots, token_ids, specs, strict=True))
        if spec.params.logprobs is not None
    }
    return StepResult(dict(zip(slots, token_ids, strict=True)), logprobs=logprobs)


def score_rows(logits: Logits, next_token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """How likely each row's next token is. `logits` fp32 [rows, vocabulary]. Raises InternalError as `sample_rows`."""
    scan = scan_of(logits)
    _check_numbers(scan)
    return tuple(_logprobs_of(scan, row, token_id, num_top) for row, token_id in enumerate(next_token_ids))


def rows_to_score(score: ScoreSpec) -> list[slice]:
    """A chunk's tokens in slices so small that their logits fit in memory; each is for one call of `score_rows`."""
    num_rows = len(score.next_token_ids)
    return [slice(start, min(start + _MAX_SCORED_ROWS, num_rows)) for start in range(0, num_rows, _MAX_SCORED_ROWS)]


def compile_kernels() -> None:
    """Everything that a draw may use, so that no request waits for the compiler."""
    logits = np.zeros((1, BLOCK), np.float32)
    params = SamplingParams(top_k=8, top_p=0.5, min_p=0.1, presence_penalty=1.0, logprobs=1)
    spec = SampleSpec(params, 0, history=TokenHistory(np.zeros(2, np.int32), 1))
    sample_step(logits, [0], [spec])


def uniform(seed: int, output_index: int) -> float:
    """In [0, 1), from Philox keyed by both numbers: any worker can make the number of any position."""
    return float(uniform_of(np.uint64(seed), np.uint64(output_index)))


def draw(logits: Logits, params: SamplingParams, output_index: int) -> int:
    """One token of one row [vocabulary] without bias, penalties and mask."""
    return _draw_rows(scan_of(logits[None]), [SampleSpec(params, output_index)])[0]


class _Scratch:
    """Memory for one step's draws, made when the first row needs it: a row's worth is too much to make for each row."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    @cached_property
    def adjusted(self) -> Logits:
        return np.empty((1, self._num_tokens), np.float32)

    @cached_property
    def counts(self) -> npt.NDArray[np.int32]:
        return np.zeros(self._num_tokens, np.int32)

    @cached_property
    def keys(self) -> npt.NDArray[np.uint64]:
        return np.empty((2, self._num_tokens), np.uint64)


def _check_numbers(scan: Scan) -> None:
    """Raises InternalError for rows with what is no number."""
    wrong = np.flatnonzero(scan.argmax == NOT_A_NUMBER).tolist()
    if wrong:
        raise InternalError(
            f"the model computed NaN or infinite logits in {len(wrong)} of {len(scan.argmax)} rows: {wrong[:8]}"
        )


def _draw_rows(scan: Scan, specs: Sequence[SampleSpec]) -> list[int]:
    _check_numbers(scan)
    token_ids: list[int] = scan.argmax.tolist()
    scratch = _Scratch(scan.logits.shape[1])
    for row, spec in enumerate(specs):
        source, place = scan, row
        if spec.masked_token_ids or spec.params.logit_bias or spec.params.has_penalties:
            source, place = scan_of(_adjusted(scan.logits[row], spec, scratch)), 0
            _check_numbers(source)
            token_ids[row] = int(source.argmax[0])
        if not spec.params.is_greedy:
            token_ids[row] = _draw_row(source, place, spec, scratch)
    return token_ids


def _draw_row(scan: Scan, row: int, spec: SampleSpec, scratch: _Scratch) -> int:
    params = spec.params
    return int(
        draw_row(
            scan.logits[row],
            scan.block_maxima[row],
            scan.highest[row],
            float(params.temperature),
            int(params.top_k),
            float(params.top_p),
            float(params.min_p),
            uniform(params.seed, spec.output_index),
            scratch.keys,
        )
    )


def _adjusted(logits: Logits, spec: SampleSpec, scratch: _Scratch) -> Logits:
    """A row [1, vocabulary] with bias, penalties and mask, in `scratch.adjusted`."""
    row = scratch.adjusted[0]
    row[:] = logits
    for token_id, bias in spec.params.logit_bias:
        row[token_id] += np.float32(bias)
    if spec.params.has_penalties:
        _penalize(row, spec.params, spec.history, scratch)
    if spec.masked_token_ids:
        row[list(spec.masked_token_ids)] = MASKED
    return scratch.adjusted


def _penalize(row: Logits, params: SamplingParams, history: TokenHistory | None, scratch: _Scratch) -> None:
    if history is None:
        raise InternalError("a draw with penalties was planned without the tokens before it")
    penalize(
        row,
        history.token_ids,
        history.num_prompt_tokens,
        float(params.repetition_penalty),
        float(params.presence_penalty),
        float(params.frequency_penalty),
        scratch.counts,
    )


def _logprobs_of(scan: Scan, row: int, token_id: int, num_top: int) -> TokenLogprobs:
    logits, block_maxima, highest = scan.logits[row], scan.block_maxima[row], scan.highest[row]
    total = sum_exp(logits, highest, np.float32(1.0), np.empty(len(block_maxima), np.float64))
    log_total = float(highest) + float(np.log(total))
    top_ids = most_likely(logits, block_maxima, num_top)
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(logits[token_id]) - log_total,
        rank=1 + int(count_above(logits, logits[token_id])),
        top=tuple((top_id, float(logits[top_id]) - log_total) for top_id in top_ids.tolist()),
    )
