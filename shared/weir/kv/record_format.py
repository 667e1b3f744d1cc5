"""The words of a sequence record and their packed form. `weir.kv.record` says where they lie and in which order."""

import struct
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weir.core.attempt import Attempt
from weir.core.sampling import SamplingParams, StopRules

MAX_STOP_TOKEN_IDS = 32
_MAX_TEXT_BYTES = 64

_CRC = struct.Struct("<I")
_LENGTHS = struct.Struct("<QIIIIIIQ")
_FACTS = struct.Struct(f"<64s64s64sddQIIII{MAX_STOP_TOKEN_IDS}i")
_LENGTHS_END = _CRC.size + _LENGTHS.size
PACKED_HEADER_BYTES = _LENGTHS_END + _FACTS.size


@dataclass(frozen=True, slots=True)
class SequenceFacts:
    """What does not change while a sequence runs under one attempt.

    The ids are ASCII of at most 64 bytes; `stop` has at most MAX_STOP_TOKEN_IDS ids.
    """

    request_id: str
    attempt: Attempt
    gateway_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopRules
    num_booked_pages: int
    traceparent: str


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """A record as it was last published. Keys and values of positions [0, num_computed_tokens) are in the pages."""

    facts: SequenceFacts
    output_token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    num_computed_tokens: int
    rng_position: int
    """Index of the output token that is drawn next."""


@dataclass(frozen=True, slots=True)
class RecordSummary:
    """The little that ownership needs; read without touching the token log."""

    request_id: str
    attempt: Attempt
    page_ids: NDArray[np.int64]
    """The published block table, shape [num_pages]."""


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """One publication. `facts_bytes` stay packed: publishing copies them, and most readers want little of them."""

    sequence: int
    attempt: Attempt
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_pages: int
    rng_position: int
    facts_bytes: bytes

    @property
    def request_id(self) -> str:
        return _text(self.facts_bytes[:_MAX_TEXT_BYTES])


pack_lengths = _LENGTHS.pack
"""sequence, attempt's dispatch and adoption, num_prompt_tokens, num_tokens, num_computed_tokens, num_pages,
rng_position. Bare, because it runs for every token."""


def seal_header(lengths: bytes, facts_bytes: bytes, facts_crc: int) -> bytes:
    """PACKED_HEADER_BYTES bytes. `facts_crc` is `zlib.crc32(facts_bytes)`, worked out once a sequence."""
    return _CRC.pack(zlib.crc32(lengths, facts_crc)) + lengths + facts_bytes


def try_unpack_header(packed: bytes) -> RecordHeader | None:
    """None if the checksum is wrong: never written, cleared, or torn."""
    lengths, facts_bytes = packed[_CRC.size : _LENGTHS_END], packed[_LENGTHS_END:PACKED_HEADER_BYTES]
    if _CRC.unpack_from(packed)[0] != zlib.crc32(lengths, zlib.crc32(facts_bytes)):
        return None
    sequence, dispatch, adoption, num_prompt, num_tokens, num_computed, num_pages, position = _LENGTHS.unpack(lengths)
    attempt = Attempt(dispatch, adoption)
    return RecordHeader(sequence, attempt, num_prompt, num_tokens, num_computed, num_pages, position, facts_bytes)


def pack_facts(facts: SequenceFacts) -> bytes:
    """All but the prompt, which is in the token log, and the attempt, which may rise. Raises ValueError."""
    stop_ids = facts.stop.stop_token_ids
    if len(stop_ids) > MAX_STOP_TOKEN_IDS:
        raise ValueError(f"stop_token_ids: {len(stop_ids)} ids, a record holds at most {MAX_STOP_TOKEN_IDS}")
    return _FACTS.pack(
        _text_bytes("request_id", facts.request_id),
        _text_bytes("gateway_id", facts.gateway_id),
        _text_bytes("traceparent", facts.traceparent),
        facts.sampling.temperature,
        facts.sampling.top_p,
        facts.sampling.seed,
        facts.sampling.top_k,
        facts.stop.max_tokens,
        facts.num_booked_pages,
        len(stop_ids),
        *stop_ids,
        *(0,) * (MAX_STOP_TOKEN_IDS - len(stop_ids)),
    )


def unpack_facts(header: RecordHeader, prompt_token_ids: tuple[int, ...]) -> SequenceFacts:
    """The facts of a publication, with the prompt as the token log has it."""
    fields = _FACTS.unpack(header.facts_bytes)
    temperature, top_p, seed, top_k, max_tokens, num_booked_pages, num_stop_ids = fields[3:10]
    return SequenceFacts(
        request_id=_text(fields[0]),
        attempt=header.attempt,
        gateway_id=_text(fields[1]),
        prompt_token_ids=prompt_token_ids,
        sampling=SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
        stop=StopRules(max_tokens=max_tokens, stop_token_ids=tuple(fields[10 : 10 + num_stop_ids])),
        num_booked_pages=num_booked_pages,
        traceparent=_text(fields[2]),
    )


def _text_bytes(field: str, text: str) -> bytes:
    encoded = text.encode("ascii")
    if len(encoded) > _MAX_TEXT_BYTES:
        raise ValueError(f"{field} {text!r}: {len(encoded)} bytes, a record holds at most {_MAX_TEXT_BYTES}")
    return encoded


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode("ascii")
