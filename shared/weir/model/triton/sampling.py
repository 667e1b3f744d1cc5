"""Samples a step's tokens on the device, whatever their parameters ask for, and tells log-probabilities.

The order of what is done to a row is that of `weir.model.sampler`. A step does only what one of its rows asks for, so
greedy rows and those with nothing but a temperature take two launches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from weir.core.errors import InternalError
from weir.core.sampling import MAX_LOGPROBS, TokenLogprobs
from weir.engine.plan import SampleSpec, StepResult, TokenHistory
from weir.model.rows import SampledRow, ScoredRows, check_logits
from weir.model.triton.batch import SCORED_ROWS, TritonLimits
from weir.model.triton.memory import HostArray, StepUpload, upload_bytes_of
from weir.ops.gpu.adjust_logits import AdjustIndex, adjust_logits
from weir.ops.gpu.sampling import NOT_A_NUMBER, philox_uniforms, sample, sampling_scratch
from weir.ops.gpu.sampling_filters import FilterIndex, sample_filtered
from weir.ops.gpu.token_logprobs import num_columns_of, token_logprobs

_FIRST_UPLOAD_BYTES = 1 << 20
_NO_HISTORY = TokenHistory(np.empty(0, np.int32), 0)


@dataclass(frozen=True, slots=True)
class ToldLogprobs:
    """Of the rows with these numbers so many each; `values` on the host, as `token_logprobs` writes them."""

    numbers: Sequence[int]
    num_tops: Sequence[int]
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class PendingSamples:
    """What was launched. `token_ids` int32 [rows] on the device, until the next launch; `host_token_ids` are on their
    way to the host."""

    rows: Sequence[SampledRow]
    token_ids: torch.Tensor
    host_token_ids: torch.Tensor
    told: ToldLogprobs | None = None

    def result(self) -> StepResult:
        """Once the device has done it. Raises InternalError: a logit is NaN or infinite."""
        by_slot = _by_slot(self.host_token_ids.tolist(), self.rows)
        told = self.told
        if told is None:
            return StepResult(by_slot)
        slots = [self.rows[number].slot for number in told.numbers]
        found = _told(told.values, [by_slot[slot] for slot in slots], told.num_tops)
        return StepResult(by_slot, logprobs=dict(zip(slots, found, strict=True)))


class DeviceSampler:
    """Holds no state of any sequence."""

    def __init__(self, limits: TritonLimits, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._scratch = sampling_scratch(limits.max_logit_rows, vocab_size, device)
        self._counts = torch.zeros(limits.max_sequences, vocab_size, dtype=torch.int32, device=device)
        self._token_ids = torch.empty(limits.max_logit_rows, dtype=torch.int32, device=device)
        self._upload = StepUpload(_FIRST_UPLOAD_BYTES, device)

    def launch(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> PendingSamples:
        """Row i of `logits` fp32 [rows, vocabulary] is that of `rows[i]`. Changes the logits.

        Raises InternalError: a row with penalties comes without its tokens.
        """
        specs = [row.spec for row in rows]
        adjusted = [number for number, spec in enumerate(specs) if _is_adjusted(spec)]
        filtered = [number for number, spec in enumerate(specs) if _is_filtered(spec, self._vocab_size)]
        told = [number for number, spec in enumerate(specs) if spec.params.logprobs is not None]
        arrays = [
            *draw_arrays(specs),
            *(_adjust_arrays(adjusted, specs, self._vocab_size) if adjusted else ()),
            *(_filter_arrays(filtered, specs, self._vocab_size) if filtered else ()),
            *(_logprob_arrays(told, specs, self._vocab_size) if told else ()),
        ]
        views = iter(self._send(arrays))
        temperatures, uniforms = next(views), next(views)
        own_logits = logits.clone() if adjusted and told else logits
        if adjusted:
            adjust_logits(logits, AdjustIndex(*(next(views) for _ in AdjustIndex.__slots__)), self._counts)
        token_ids = self._token_ids[: len(rows)]
        sample(logits, temperatures, uniforms, token_ids, self._scratch)
        if filtered:
            sample_filtered(logits, FilterIndex(*(next(views) for _ in FilterIndex.__slots__)), uniforms, token_ids)
        if not told:
            return PendingSamples(rows, token_ids, _on_host(token_ids))
        told_rows, num_tops = next(views), next(views)
        out = self._logprobs(own_logits, told_rows, token_ids.index_select(0, told_rows), num_tops, MAX_LOGPROBS)
        tops = _num_tops(told, specs, self._vocab_size)
        return PendingSamples(rows, token_ids, _on_host(token_ids), ToldLogprobs(told, tops, _on_host(out)))

    def prompt_logprobs(
        self, scored: ScoredRows, logits_of: Callable[[range], torch.Tensor]
    ) -> tuple[TokenLogprobs, ...]:
        """`logits_of` computes the logits of some rows; it is asked for few at a time: a whole prompt's are gigabytes.

        Raises InternalError for logits that are not finite.
        """
        spec, found = scored.spec, list[TokenLogprobs]()
        num_top = min(spec.num_top, self._vocab_size)
        for start in range(0, len(spec.next_token_ids), SCORED_ROWS):
            part = slice(start, start + SCORED_ROWS)
            token_ids, logits = spec.next_token_ids[part], logits_of(scored.rows[part])
            count = len(token_ids)
            views = self._send(
                [
                    np.zeros(count, np.float32),
                    np.zeros(count, np.float64),
                    np.arange(count, dtype=np.int32),
                    np.array(token_ids, np.int32),
                    np.full(count, num_top, np.int32),
                ]
            )
            most_likely = self._token_ids[:count]
            sample(logits, views[0], views[1], most_likely, self._scratch)  # says which rows are not numbers
            out = self._logprobs(logits, views[2], views[3], views[4], num_top)
            _check_tokens(most_likely.tolist(), count)
            found += _told(out, token_ids, [num_top] * count)
        return tuple(found)

    def _send(self, arrays: Sequence[HostArray]) -> list[torch.Tensor]:
        """Histories are as long as sequences are: the upload grows to what a step has needed."""
        num_bytes = upload_bytes_of(arrays)
        if num_bytes > self._upload.capacity_bytes:
            self._upload = StepUpload(1 << (num_bytes - 1).bit_length(), self._device)
        return self._upload.send(arrays)

    def _logprobs(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        token_ids: torch.Tensor,
        num_tops: torch.Tensor,
        max_top: int,
    ) -> torch.Tensor:
        out = torch.empty(len(rows), num_columns_of(max_top), dtype=torch.float64, device=logits.device)
        token_logprobs(logits, rows, token_ids, num_tops, out)
        return out


def _on_host(values: torch.Tensor) -> torch.Tensor:
    """A copy that is on its way when this returns: to pinned memory, from a GPU."""
    return values.to("cpu", copy=True, non_blocking=True)


def _is_adjusted(spec: SampleSpec) -> bool:
    return bool(spec.masked_token_ids or spec.params.logit_bias or spec.params.has_penalties or spec.mask is not None)


def _is_filtered(spec: SampleSpec, vocab_size: int) -> bool:
    params = spec.params
    has_filter = 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0
    return has_filter and not params.is_greedy


def draw_arrays(specs: Sequence[SampleSpec]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """Temperatures, of which 0 is greedy, and uniform numbers; a greedy row's is 0: nothing is drawn."""
    temperatures = [0.0 if spec.params.is_greedy else spec.params.temperature for spec in specs]
    drawn = [number for number, temperature in enumerate(temperatures) if temperature]
    uniforms = np.zeros(len(specs), np.float64)
    if drawn:
        uniforms[drawn] = philox_uniforms(
            np.array([specs[number].params.seed for number in drawn], np.uint64),
            np.array([specs[number].output_index for number in drawn], np.uint64),
        )
    return np.array(temperatures, np.float32), uniforms


def _filter_arrays(numbers: Sequence[int], specs: Sequence[SampleSpec], vocab_size: int) -> tuple[HostArray, ...]:
    """As `FilterIndex` has them."""
    params = [specs[number].params for number in numbers]
    return (
        np.array(numbers, np.int32),
        np.array([1.0 / each.temperature for each in params], np.float32),
        np.array([min(each.top_k, vocab_size) for each in params], np.int32),
        np.array([each.top_p for each in params], np.float64),
        np.array([each.min_p for each in params], np.float64),
    )


class _Adjusted(NamedTuple):
    """Of one row."""

    bias: tuple[tuple[int, float], ...]
    history: TokenHistory
    penalties: tuple[float, float, float]
    masked: npt.NDArray[np.int32]

    @classmethod
    def of(cls, spec: SampleSpec, vocab_size: int) -> "_Adjusted":
        params, history = spec.params, _NO_HISTORY
        if params.has_penalties:
            if spec.history is None:
                raise InternalError("a token with penalties was planned without the tokens before it")
            history = spec.history
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        return cls(params.logit_bias, history, penalties, _masked_ids(spec, vocab_size))


def _masked_ids(spec: SampleSpec, vocab_size: int) -> npt.NDArray[np.int32]:
    """Of a row with a grammar nearly the whole vocabulary, a copy of a few hundred kilobytes."""
    allowed = spec.allowed()
    if allowed is None:
        return np.array(spec.masked_token_ids, np.int32)
    bits = np.unpackbits(allowed.view(np.uint8), count=vocab_size, bitorder="little")
    return np.flatnonzero(bits == 0).astype(np.int32)


def _adjust_arrays(numbers: Sequence[int], specs: Sequence[SampleSpec], vocab_size: int) -> tuple[HostArray, ...]:
    """As `AdjustIndex` has them."""
    rows = [_Adjusted.of(specs[number], vocab_size) for number in numbers]
    bias = [entry for row in rows for entry in row.bias]
    histories = [row.history.token_ids for row in rows]
    history_firsts = _firsts([len(history) for history in histories])
    num_prompt_tokens = np.array([row.history.num_prompt_tokens for row in rows], np.int32)
    return (
        np.array(numbers, np.int32),
        _firsts([len(row.bias) for row in rows]),
        np.array([token_id for token_id, _ in bias], np.int32),
        np.array([value for _, value in bias], np.float32),
        history_firsts,
        history_firsts[:-1] + num_prompt_tokens,
        np.concatenate(histories),
        np.array([row.penalties for row in rows], np.float64),
        _firsts([len(row.masked) for row in rows]),
        np.concatenate([row.masked for row in rows]),
    )


def _firsts(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    """Where each of these begins in one list of all, and where the last one ends."""
    return np.cumsum([0, *lengths]).astype(np.int32)


def _num_tops(numbers: Sequence[int], specs: Sequence[SampleSpec], vocab_size: int) -> list[int]:
    return [min(specs[number].params.logprobs or 0, vocab_size) for number in numbers]


def _logprob_arrays(numbers: Sequence[int], specs: Sequence[SampleSpec], vocab_size: int) -> tuple[HostArray, ...]:
    return np.array(numbers, np.int32), np.array(_num_tops(numbers, specs, vocab_size), np.int32)


def _told(out: torch.Tensor, token_ids: Sequence[int], num_tops: Sequence[int]) -> list[TokenLogprobs]:
    """`out` as `token_logprobs` of `weir.ops.gpu` writes it."""
    found = []
    for values, token_id, num_top in zip(out.tolist(), token_ids, num_tops, strict=True):
        top = values[2 : num_columns_of(num_top)]
        pairs = tuple(zip(map(int, top[::2]), top[1::2], strict=True))
        found.append(TokenLogprobs(token_id, values[0], int(values[1]), pairs))
    return found


def _check_tokens(token_ids: Sequence[int], num_rows: int) -> None:
    check_logits([number for number, token_id in enumerate(token_ids) if token_id == NOT_A_NUMBER], num_rows)


def _by_slot(token_ids: Sequence[int], rows: Sequence[SampledRow]) -> dict[int, int]:
    _check_tokens(token_ids, len(rows))
    return {row.slot: token_id for row, token_id in zip(rows, token_ids, strict=True)}
