"""The fields of a sequence record and their packed form; for where they lie see `weir.kv.records.record`."""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weir.core.grammar import GRAMMAR_KINDS, Grammar
from weir.core.life import NO_PREFERENCE, Attempt, FinishReason, SchedulingParams
from weir.core.sampling import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
    StopRules,
    TokenLogprobs,
)
from weir.kv.prefixes import HASH_BYTES

_MAX_TEXT_BYTES = 64
_NOT_ASKED = -1
_FREE = 0
"""Instead of the number of a kind of grammar, counted from 1."""
_EMPTY = -1

_CRC = struct.Struct("<I")
_LENGTHS = struct.Struct("<QIIIIIIIQIIIII")
_PARAMS = struct.Struct(f"<64s64s64s64s6dQIIIIiiiII{HASH_BYTES}sdIdII")
_STOP_ID = np.dtype("<i4")
_BIAS = np.dtype([("token_id", "<i4"), ("bias", "<f8")])
_LOGPROBS = np.dtype(
    [
        ("output_index", "<i4"),
        ("token_id", "<i4"),
        ("logprob", "<f4"),
        ("rank", "<i4"),
        ("num_top", "<i4"),
        ("top_ids", "<i4", (MAX_LOGPROBS,)),
        ("top_logprobs", "<f4", (MAX_LOGPROBS,)),
    ]
)
PACKED_HEADER_BYTES = _CRC.size + _LENGTHS.size
MAX_PARAMS_BYTES = _PARAMS.size + MAX_STOP_TOKEN_IDS * _STOP_ID.itemsize + MAX_LOGIT_BIAS * _BIAS.itemsize
MAX_KEPT_LOGPROBS = 8
LOGPROBS_BYTES = MAX_KEPT_LOGPROBS * _LOGPROBS.itemsize


@dataclass(frozen=True, slots=True)
class SequenceParams:
    """What does not change while a sequence runs under one attempt.

    The ids are ASCII of at most 64 bytes.
    """

    request_id: str
    attempt: Attempt
    gateway_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopRules
    num_reserved_pages: int
    traceparent: str
    scheduling: SchedulingParams = NO_PREFERENCE
    prefix_seed: bytes = b""
    """Under which its pages may serve others (`weir.kv.prefixes`); empty: they may not."""
    decode_worker_id: str = ""
    """The worker that it is booked on; empty: not known."""
    keep_ms: int = 0
    """How long it is kept after its gateway has gone, for another gateway to claim it; 0: not at all."""


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """A record as it was last published. Keys and values of positions [0, num_computed_tokens) are in the pages.

    Page i of the block table is that of positions [16 i, 16 i + 16). Those before `first_page` are not the sequence's
    any more: nothing that it still computes sees them.
    """

    params: SequenceParams
    output_token_ids: tuple[int, ...]
    output_logprobs: tuple[TokenLogprobs, ...]
    """One entry an output token, where the request asks for them."""
    block_table: tuple[int, ...]
    num_computed_tokens: int
    rng_position: int
    """Index of the output token that is sampled next."""
    finish_reason: FinishReason | None = None
    """Why it has ended; None: it goes on."""
    first_page: int = 0

    @property
    def held_pages(self) -> tuple[int, ...]:
        return self.block_table[self.first_page :]


@dataclass(frozen=True, slots=True)
class RecordSummary:
    """What the ownership table needs of a record; read without touching the token log."""

    request_id: str
    attempt: Attempt
    page_ids: NDArray[np.int64]
    """Those that it holds, from its `first_page` on, as published; shape [num_pages]."""
    num_computed_tokens: int
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    """Why it has ended; None: it goes on."""
    first_page: int = 0


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """One publication. `params_bytes` stay packed: most readers want little of them."""

    sequence: int
    attempt: Attempt
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_pages: int
    first_page: int
    rng_position: int
    end_code: int
    tokens_crc: int
    table_crc: int
    params_bytes: bytes

    @property
    def request_id(self) -> str:
        return _text(self.params_bytes[:_MAX_TEXT_BYTES])

    @property
    def finish_reason(self) -> FinishReason | None:
        return _REASON_OF[self.end_code]


RUNS = 0
_END_CODES = {FinishReason.STOP: 1, FinishReason.LENGTH: 2, FinishReason.CANCELLED: 3, FinishReason.DEADLINE: 4}
_REASON_OF: dict[int, FinishReason | None] = {RUNS: None} | {code: reason for reason, code in _END_CODES.items()}

end_code_of = _END_CODES.__getitem__
"""What the header says of a sequence that has ended; RUNS of any other."""

pack_lengths = _LENGTHS.pack
"""sequence, attempt's dispatch and adoption, num_prompt_tokens, num_tokens, num_computed_tokens, num_pages, first_page,
rng_position, number and CRC of the parameters' bytes, code of the end, CRCs of tokens and block table. Bare, because it
runs for every token."""


def seal_header(lengths: bytes) -> bytes:
    """PACKED_HEADER_BYTES bytes."""
    return _CRC.pack(zlib.crc32(lengths)) + lengths


def try_unpack_header(packed: bytes, params_area: memoryview) -> RecordHeader | None:
    """None if a checksum is wrong: never written, cleared, or torn. `params_area` has MAX_PARAMS_BYTES bytes."""
    lengths = packed[_CRC.size : PACKED_HEADER_BYTES]
    if _CRC.unpack_from(packed)[0] != zlib.crc32(lengths):
        return None
    numbers = _LENGTHS.unpack(lengths)
    num_params_bytes, params_crc, end_code, tokens_crc, table_crc = numbers[9:]
    # bytes() copies: what is checked is what is used, whoever writes meanwhile
    params_bytes = bytes(params_area[:num_params_bytes])
    if num_params_bytes < _PARAMS.size or zlib.crc32(params_bytes) != params_crc:
        return None
    if end_code not in _REASON_OF:
        return None
    sequence, dispatch, adoption, num_prompt, num_tokens, num_computed, num_pages, first_page, position = numbers[:9]
    return RecordHeader(
        sequence,
        Attempt(dispatch, adoption),
        num_prompt,
        num_tokens,
        num_computed,
        num_pages,
        first_page,
        position,
        end_code,
        tokens_crc,
        table_crc,
        params_bytes,
    )


def pack_params(params: SequenceParams) -> bytes:
    """All but the prompt, which is in the token log, the attempt, which may rise, and the source of a grammar, which is
    in the annex: at most MAX_PARAMS_BYTES.

    Raises ValueError for more stop ids or biases than a record holds.
    """
    sampling, stop = params.sampling, params.stop
    for field, values, limit in (
        ("stop_token_ids", stop.stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("logit_bias", sampling.logit_bias, MAX_LOGIT_BIAS),
    ):
        if len(values) > limit:
            raise ValueError(f"{field}: {len(values)} ids, a record holds at most {limit}")
    head = _PARAMS.pack(
        _text_bytes("request_id", params.request_id),
        _text_bytes("gateway_id", params.gateway_id),
        _text_bytes("traceparent", params.traceparent),
        _text_bytes("decode_worker_id", params.decode_worker_id),
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.seed,
        sampling.top_k,
        stop.max_tokens,
        stop.min_tokens,
        params.num_reserved_pages,
        params.scheduling.lane_priority,
        _NOT_ASKED if sampling.logprobs is None else sampling.logprobs,
        _NOT_ASKED if sampling.prompt_logprobs is None else sampling.prompt_logprobs,
        len(stop.stop_token_ids),
        len(sampling.logit_bias),
        params.prefix_seed,
        params.scheduling.rank,
        params.scheduling.itl_target_ms,
        params.scheduling.predicted_output_tokens,
        params.keep_ms,
        _FREE if sampling.grammar is None else 1 + GRAMMAR_KINDS.index(sampling.grammar.kind),
    )
    stop_ids = np.array(stop.stop_token_ids, _STOP_ID)
    return head + stop_ids.tobytes() + np.array(list(sampling.logit_bias), _BIAS).tobytes()


def has_grammar(header: RecordHeader) -> bool:
    """Whether there is an annex that belongs to it."""
    return int(_PARAMS.unpack_from(header.params_bytes)[-1]) != _FREE


def unpack_params(
    header: RecordHeader, prompt_token_ids: tuple[int, ...], grammar_source: bytes = b""
) -> SequenceParams:
    """The parameters of a publication, with the prompt as the token log has it, and a grammar's source as the annex."""
    fields = _PARAMS.unpack_from(header.params_bytes)
    temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty = fields[4:10]
    seed, top_k, max_tokens, min_tokens, num_reserved_pages, lane_priority = fields[10:16]
    logprobs, prompt_logprobs = (None if number == _NOT_ASKED else number for number in fields[16:18])
    num_stop_ids, num_biases, prefix_seed, rank, itl_target_ms, predicted, keep_ms, kind = fields[18:]
    stop_ids = np.frombuffer(header.params_bytes, _STOP_ID, num_stop_ids, _PARAMS.size)
    biases = np.frombuffer(header.params_bytes, _BIAS, num_biases, _PARAMS.size + stop_ids.nbytes)
    return SequenceParams(
        request_id=_text(fields[0]),
        attempt=header.attempt,
        gateway_id=_text(fields[1]),
        prompt_token_ids=prompt_token_ids,
        sampling=SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=tuple(biases.tolist()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=None if kind == _FREE else Grammar(GRAMMAR_KINDS[kind - 1], grammar_source.decode()),
        ),
        stop=StopRules(max_tokens, tuple(stop_ids.tolist()), min_tokens),
        num_reserved_pages=num_reserved_pages,
        traceparent=_text(fields[2]),
        scheduling=SchedulingParams(lane_priority, rank, itl_target_ms, predicted),
        prefix_seed=prefix_seed if any(prefix_seed) else b"",
        decode_worker_id=_text(fields[3]),
        keep_ms=keep_ms,
    )


class LogprobRing:
    """The log-probabilities of the newest MAX_KEPT_LOGPROBS output tokens, over the first LOGPROBS_BYTES of `memory`.

    An adopter sends again the token or two that its predecessor sampled but may not have sent. Requests that ask for
    log-probabilities would miss those of just these tokens. An entry is that of the output token whose index it has.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def clear(self) -> None:
        self._entries()["output_index"] = _EMPTY

    def keep(self, output_index: int, logprobs: TokenLogprobs) -> None:
        """A death half way leaves the entry empty."""
        entry = self._entries()[output_index % MAX_KEPT_LOGPROBS]
        entry["output_index"] = _EMPTY
        num_top = len(logprobs.top)
        entry["token_id"], entry["logprob"], entry["rank"] = logprobs.token_id, logprobs.logprob, logprobs.rank
        entry["num_top"] = num_top
        entry["top_ids"][:num_top] = [token_id for token_id, _ in logprobs.top]
        entry["top_logprobs"][:num_top] = [logprob for _, logprob in logprobs.top]
        entry["output_index"] = output_index

    def read(self, output_token_ids: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """One for each token; those that are not in the ring are unknown."""
        found = {int(entry["output_index"]): entry for entry in self._entries().copy()}
        return tuple(
            _logprobs_of(found[index]) if index in found else TokenLogprobs.unknown(token_id)
            for index, token_id in enumerate(output_token_ids)
        )

    def _entries(self) -> NDArray[np.void]:
        # made anew each time: an array that lives on would keep the segment from being closed
        return np.frombuffer(self._memory, _LOGPROBS, MAX_KEPT_LOGPROBS)


def _text_bytes(field: str, text: str) -> bytes:
    encoded = text.encode("ascii")
    if len(encoded) > _MAX_TEXT_BYTES:
        raise ValueError(f"{field} {text!r}: {len(encoded)} bytes, a record holds at most {_MAX_TEXT_BYTES}")
    return encoded


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode("ascii")


def _logprobs_of(entry: np.void) -> TokenLogprobs:
    num_top = int(entry["num_top"])
    top = tuple(zip(entry["top_ids"][:num_top].tolist(), entry["top_logprobs"][:num_top].tolist(), strict=True))
    return TokenLogprobs(int(entry["token_id"]), float(entry["logprob"]), int(entry["rank"]), top)
