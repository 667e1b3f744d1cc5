"""Samples tokens from logits. A row's token depends on its own logits, parameters, tokens and output index only.

The order is vLLM's: `logit_bias` is added, tokens of prompt and output get the repetition penalty, tokens of the output
the frequency and presence penalties, forbidden tokens and those that a grammar does not allow are masked; then
temperature, top-k, top-p and min-p (Hugging Face's order; vLLM's V1 engine applies min-p before the other two, which
differs only where top-p is used too). Greedy sampling sees bias, penalties and mask as well. Log-probabilities are
those of the logits before all that.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weir.core.errors import InternalError
from weir.core.sampling import SamplingParams, TokenLogprobs
from weir.engine.plan import SampleSpec, StepResult, TokenHistory
from weir.model.rows import SampledRow, ScoredRows, check_logits
from weir.ops.cpu.sampling import count_above, most_likely, penalize, sample_token, uniform_of
from weir.ops.cpu.sampling_scan import (
    BLOCK,
    NOT_A_NUMBER,
    num_scan_blocks,
    only_allowed,
    scan_allowed,
    scan_rows,
    sum_exp,
)

Logits = npt.NDArray[np.float32]

MASKED = np.float32(-3e38)
"""The logit of a token that may not be sampled. Finite: should all be masked, one is sampled still."""
_MAX_SCORED_ROWS = 64


class Scan(NamedTuple):
    """What one pass over rows of logits, fp32 [rows, vocabulary], finds (`weir.ops.cpu.sampling_scan`)."""

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


def sample_step(scan: Scan, rows: Sequence[SampledRow]) -> StepResult:
    """The token of each of `rows`, with the log-probabilities that it asks for; row i of `scan` is `rows[i]`.

    Raises:
        InternalError: a logit is NaN or infinite; no token of the step may be used then.
    """
    token_ids = sample_tokens(scan, [row.spec for row in rows])
    logprobs = {
        row.slot: _logprobs_of(scan, index, token_id, row.spec.params.logprobs)
        for index, (row, token_id) in enumerate(zip(rows, token_ids, strict=True))
        if row.spec.params.logprobs is not None
    }
    return StepResult({row.slot: token_id for row, token_id in zip(rows, token_ids, strict=True)}, logprobs=logprobs)


def sample_tokens(scan: Scan, specs: Sequence[SampleSpec]) -> list[int]:
    """One token a row, one spec a row; the logits, C-contiguous, are not changed. Raises InternalError."""
    _check_scan(scan)
    token_ids: list[int] = scan.argmax.tolist()
    scratch = _Scratch(scan.logits.shape[1])
    for row, spec in enumerate(specs):
        source, source_row = scan, row
        allowed = spec.allowed()
        if allowed is not None and (known := _known_token(token_ids[row], spec, allowed)) is not None:
            token_ids[row] = known
            continue
        if allowed is not None or spec.masked_token_ids or spec.params.logit_bias or spec.params.has_penalties:
            source, source_row = _adjusted_scan(scan.logits[row], spec, allowed, scratch), 0
            _check_scan(source)
            token_ids[row] = int(source.argmax[0])
        if not spec.params.is_greedy:
            token_ids[row] = _sample_row(source, source_row, spec, scratch)
    return token_ids


def token_logprobs(logits: Logits, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Of one token a row. `logits` fp32 [rows, vocabulary]. Raises InternalError for logits that are not finite."""
    scan = scan_of(logits)
    _check_scan(scan)
    return tuple(_logprobs_of(scan, row, token_id, num_top) for row, token_id in enumerate(token_ids))


def prompt_logprobs(scored: ScoredRows, logits_of: Callable[[range], Logits]) -> tuple[TokenLogprobs, ...]:
    """`logits_of` computes the logits of some rows; it is asked for few at a time: a whole prompt's are gigabytes."""
    spec, found = scored.spec, list[TokenLogprobs]()
    for start in range(0, len(spec.next_token_ids), _MAX_SCORED_ROWS):
        part = slice(start, start + _MAX_SCORED_ROWS)
        found += token_logprobs(logits_of(scored.rows[part]), spec.next_token_ids[part], spec.num_top)
    return tuple(found)


def compile_kernels() -> None:
    """Everything that sampling may use, so that no request waits for the compiler."""
    logits = np.zeros((1, BLOCK), np.float32)
    params = SamplingParams(top_k=8, top_p=0.5, min_p=0.1, presence_penalty=1.0, logprobs=1)
    spec = SampleSpec(params, 0, history=TokenHistory(np.zeros(2, np.int32), 1), mask=_AllTokens())
    sample_step(scan_of(logits), [SampledRow(0, 0, spec)])


def uniform(seed: int, output_index: int) -> float:
    """In [0, 1), from Philox keyed by both numbers: any worker can make the number of any position."""
    return float(uniform_of(np.uint64(seed), np.uint64(output_index)))


class _AllTokens:
    """Of one block of logits."""

    def allowed(self) -> npt.NDArray[np.uint32]:
        return np.full(BLOCK // 32, 0xFFFFFFFF, np.uint32)


class _Scratch:
    """Memory for one step, made when the first row needs it: a row's worth is too much to make for each row."""

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


def _check_scan(scan: Scan) -> None:
    check_logits(np.flatnonzero(scan.argmax == NOT_A_NUMBER).tolist(), len(scan.argmax))


def _sample_row(scan: Scan, row: int, spec: SampleSpec, scratch: _Scratch) -> int:
    params = spec.params
    return int(
        sample_token(
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


def _known_token(argmax: int, spec: SampleSpec, allowed: npt.NDArray[np.uint32]) -> int | None:
    """The token where the row need not be read again for it: the only one, or, of a greedy one, the row's own."""
    params = spec.params
    is_plain = params.is_greedy and not params.logit_bias and not params.has_penalties
    if is_plain and (int(allowed[argmax >> 5]) >> (argmax & 31)) & 1:
        return argmax
    only = only_allowed(allowed)
    return only if only >= 0 else None


def _adjusted_scan(logits: Logits, spec: SampleSpec, allowed: npt.NDArray[np.uint32] | None, scratch: _Scratch) -> Scan:
    """Of a row [1, vocabulary] with bias, penalties and mask, in `scratch.adjusted`."""
    row = scratch.adjusted[0]
    is_copied = allowed is None or bool(spec.params.logit_bias) or spec.params.has_penalties
    if is_copied:
        row[:] = logits
    for token_id, bias in spec.params.logit_bias:
        row[token_id] += np.float32(bias)
    if spec.params.has_penalties:
        _penalize(row, spec.params, spec.history, scratch)
    if allowed is None:
        row[list(spec.masked_token_ids)] = MASKED
        return scan_of(scratch.adjusted)
    block_maxima = np.empty((1, num_scan_blocks(len(row))), np.float32)
    highest, argmax = scan_allowed(row if is_copied else logits, allowed, MASKED, row, block_maxima[0])
    return Scan(scratch.adjusted, block_maxima, np.array([highest], np.float32), np.array([argmax], np.int32))


def _penalize(row: Logits, params: SamplingParams, history: TokenHistory | None, scratch: _Scratch) -> None:
    if history is None:
        raise InternalError("a token with penalties was planned without the tokens before it")
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
