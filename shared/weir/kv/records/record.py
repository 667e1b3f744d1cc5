"""Sequence records: what another worker needs to go on with a sequence whose worker died.

    0                    header slot 0   CRC | lengths, attempt, random position, end, CRCs of the other parts
    RECORD_HEADER_BYTES  header slot 1   the same
                         parameters      RECORD_PARAMS_BYTES bytes       fixed at `begin`
                         logprobs        RECORD_LOGPROBS_BYTES bytes     of the newest output tokens
                         token log       int32[max_context_tokens]       prompt, then output; append-only
                         block table     int32[max_pages_per_sequence]   append-only once published (see `drop_pages`)

Of the block table what lies before `first_page` stays as it is and names nothing: these pages were given back.

The newest header slot with right CRCs counts; a publication overwrites the other one. Data come first, the header
last, so a header never speaks of data that are not there, and one that was torn leaves its predecessor valid. The CRCs
of tokens and block table run along with what is appended, since a publication is made for every token; whoever reads
these parts compares them. What few sequences have lies in an annex (`weir.kv.records.annex`).

Readers in other processes come after a system call of the writer (a gRPC message, its death), which orders memory.
"""

import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weir.core.life import Attempt, FinishReason
from weir.core.sampling import TokenLogprobs
from weir.kv.geometry import PAGE_TOKENS, ArenaGeometry
from weir.kv.layout import RECORD_HEADER_BYTES, RECORD_LOGPROBS_BYTES, RECORD_PARAMS_BYTES
from weir.kv.records.annex import AnnexFull, DamagedAnnex, RecordAnnex
from weir.kv.records.format import (
    PACKED_HEADER_BYTES,
    RUNS,
    LogprobRing,
    RecordHeader,
    RecordSummary,
    SequenceParams,
    SequenceSnapshot,
    end_code_of,
    has_grammar,
    pack_lengths,
    pack_params,
    seal_header,
    try_unpack_header,
    unpack_params,
)

__all__ = ["RecordSummary", "SequenceParams", "SequenceRecord", "SequenceSnapshot"]

_pack_id = struct.Struct("<i").pack


@dataclass(slots=True)
class _Writer:
    """What the owner has written; ahead of the newest header by what is not yet published."""

    sequence: int
    attempt: Attempt
    num_prompt_tokens: int
    num_tokens: int
    num_pages: int
    num_published_pages: int
    num_params_bytes: int
    params_crc: int
    first_page: int = 0
    tokens_crc: int = 0
    table_crc: int = 0
    end_code: int = RUNS


class SequenceRecord:
    """One record in the segment, written by the owner of its slot alone.

    To go on with a handed-off sequence, `read` it and append: the object continues where the header stands.
    """

    def __init__(self, memory: memoryview, geometry: ArenaGeometry, annex: RecordAnnex | None = None) -> None:
        """`annex`: that of the same slot, which is cleared with the record."""
        self._max_tokens = geometry.max_context_tokens
        self._max_pages = geometry.max_pages_per_sequence
        self._num_arena_pages = geometry.num_pages
        params_start = 2 * RECORD_HEADER_BYTES
        logprobs_start = params_start + RECORD_PARAMS_BYTES
        log_start = logprobs_start + RECORD_LOGPROBS_BYTES
        table_start = log_start + 4 * self._max_tokens
        self._headers = memory[:params_start]
        self._params = memory[params_start:logprobs_start]
        self._logprobs = LogprobRing(memory[logprobs_start:log_start])
        self._token_log = memory[log_start:table_start].cast("i")
        self._block_table = memory[table_start : table_start + 4 * self._max_pages].cast("i")
        self._annex = annex
        self._writer: _Writer | None = None

    def begin(self, params: SequenceParams, output_token_ids: Sequence[int] = ()) -> None:
        """Starts a new sequence in this slot; `output_token_ids` were sampled elsewhere. Nothing is readable before
        `publish`. Raises ValueError."""
        params_bytes = pack_params(params)
        num_prompt_tokens = len(params.prompt_token_ids)
        num_tokens = num_prompt_tokens + len(output_token_ids)
        if not 1 <= num_prompt_tokens <= self._max_tokens:
            raise ValueError(f"prompt_token_ids: {num_prompt_tokens} ids, allowed are 1 to {self._max_tokens}")
        if num_tokens > self._max_tokens:
            num_left = self._max_tokens - num_prompt_tokens
            raise ValueError(f"output_token_ids: {len(output_token_ids)} ids, allowed are 0 to {num_left}")
        self.clear()
        self._write_grammar(params)
        self._params[: len(params_bytes)] = params_bytes
        if params.sampling.logprobs is not None:
            self._logprobs.clear()
        token_ids = array("i", (*params.prompt_token_ids, *output_token_ids))
        self._token_log[:num_tokens] = memoryview(token_ids)
        self._writer = _Writer(
            sequence=0,
            attempt=params.attempt,
            num_prompt_tokens=num_prompt_tokens,
            num_tokens=num_tokens,
            num_pages=0,
            num_published_pages=0,
            num_params_bytes=len(params_bytes),
            params_crc=zlib.crc32(params_bytes),
            tokens_crc=zlib.crc32(token_ids),
        )

    def append_token(self, token_id: int) -> None:
        """Adds one output token; readable after the next `publish`. Raises ValueError when the log is full."""
        writer = self._require_writer()
        if writer.num_tokens >= self._max_tokens:
            raise ValueError(f"token log is full: {self._max_tokens} tokens; the sequence must end before")
        self._token_log[writer.num_tokens] = token_id
        writer.tokens_crc = zlib.crc32(_pack_id(token_id), writer.tokens_crc)
        writer.num_tokens += 1

    def keep_logprobs(self, output_index: int, logprobs: TokenLogprobs) -> None:
        """Those of the output token that is appended next; the newest MAX_KEPT_LOGPROBS can be read again."""
        self._logprobs.keep(output_index, logprobs)

    def set_block_table(self, page_ids: Sequence[int], first_page: int = 0) -> None:
        """Sets the whole block table, of which what is before `first_page` is not the sequence's. Raises ValueError if
        that would change what is published, or does not fit."""
        writer = self._require_writer()
        num_published = writer.num_published_pages
        if list(page_ids[:num_published]) != self._block_table[:num_published].tolist():
            raise ValueError(f"page_ids: the first {num_published} entries are published and cannot change")
        if len(page_ids) > self._max_pages:
            raise ValueError(f"page_ids: {len(page_ids)} pages, a record holds at most {self._max_pages}")
        for page_id in page_ids:
            self._check_page(page_id)
        if not (writer.first_page if num_published else 0) <= first_page <= len(page_ids):
            raise ValueError(
                f"first_page {first_page}: it was {writer.first_page}, and there are {len(page_ids)} pages"
            )
        table = array("i", page_ids)
        self._block_table[: len(table)] = memoryview(table)
        writer.num_pages, writer.table_crc, writer.first_page = len(table), zlib.crc32(table), first_page

    def append_page(self, page_id: int) -> None:
        """Adds one page to the block table; readable after the next `publish`. Raises ValueError when it is full."""
        writer = self._require_writer()
        if writer.num_pages >= self._max_pages:
            raise ValueError(f"block table is full: {self._max_pages} pages; the sequence must end before")
        self._check_page(page_id)
        self._block_table[writer.num_pages] = page_id
        writer.table_crc = zlib.crc32(_pack_id(page_id), writer.table_crc)
        writer.num_pages += 1

    def publish(self, num_computed_tokens: int) -> None:
        """Makes everything appended so far readable, in one step. Call it before a token leaves the process."""
        writer = self._require_writer()
        if not 0 <= num_computed_tokens <= writer.num_tokens:
            raise ValueError(f"num_computed_tokens {num_computed_tokens}: allowed are 0 to {writer.num_tokens}")
        writer.sequence += 1
        lengths = pack_lengths(
            writer.sequence,
            writer.attempt.dispatch,
            writer.attempt.adoption,
            writer.num_prompt_tokens,
            writer.num_tokens,
            num_computed_tokens,
            writer.num_pages,
            writer.first_page,
            writer.num_tokens - writer.num_prompt_tokens,
            writer.num_params_bytes,
            writer.params_crc,
            writer.end_code,
            writer.tokens_crc,
            writer.table_crc,
        )
        start = (writer.sequence & 1) * RECORD_HEADER_BYTES
        self._headers[start : start + PACKED_HEADER_BYTES] = seal_header(lengths)
        writer.num_published_pages = writer.num_pages

    def drop_pages(self, num_kept: int) -> None:
        """Takes all but the first `num_kept` pages back, and publishes that before it returns.

        The pages may go to somebody else from then on. What was computed in the kept ones counts. Should the next
        publication be torn, this one is the one before it, and not one that still names the pages. Of a sequence that
        has given its first pages back nothing can be kept: the others are of no use without those behind them.
        """
        writer = self._require_writer()
        most = 0 if writer.first_page else writer.num_pages
        if not 0 <= num_kept <= most:
            raise ValueError(
                f"num_kept {num_kept}: the block table has {writer.num_pages} pages, from {writer.first_page} on"
            )
        num_computed_tokens = self._num_computed_tokens()
        writer.num_pages, writer.table_crc = num_kept, zlib.crc32(self._block_table[:num_kept])
        writer.first_page = 0
        self.publish(min(num_computed_tokens, num_kept * PAGE_TOKENS))

    def drop_first_pages(self, first_page: int) -> None:
        """Takes the pages before `first_page` back, of which nothing that is still to be computed sees a token, and
        publishes that before it returns. They may go to somebody else from then on, as in `drop_pages`.

        Raises ValueError if what is in them was not computed, or if it would bring pages back.
        """
        writer, num_computed_tokens = self._require_writer(), self._num_computed_tokens()
        if not writer.first_page <= first_page <= min(writer.num_pages, num_computed_tokens // PAGE_TOKENS):
            raise ValueError(
                f"first_page {first_page}: it is {writer.first_page}, and {num_computed_tokens} tokens are computed"
            )
        writer.first_page = first_page
        self.publish(num_computed_tokens)

    def raise_adoption(self) -> bool:
        """Publishes the same sequence under the next adoption, for the one who takes it from a worker that has ended:
        nobody else may write the record at that time. False: there is no valid record."""
        header = self._newest_header()
        if header is None:
            return False
        self._writer = _writer_after(header)
        self._writer.attempt = Attempt(header.attempt.dispatch, header.attempt.adoption + 1)
        self.publish(header.num_computed_tokens)
        self._writer = None
        return True

    def end(self, reason: FinishReason) -> None:
        """Publishes that the sequence has ended with its last token, and has no pages any more: they may go to somebody
        else. Whoever reads it later knows what its client may not have got yet. The slot is taken until `clear`."""
        self._require_writer().end_code = end_code_of(reason)
        self.drop_pages(0)

    def read(self) -> SequenceSnapshot | None:
        """The newest publication, or None where there is none that is whole (`why_unreadable` says why)."""
        header = self._newest_header()
        if header is None:
            return None
        log, table = self._token_log[: header.num_tokens].tobytes(), self._block_table[: header.num_pages].tobytes()
        if zlib.crc32(log) != header.tokens_crc or zlib.crc32(table) != header.table_crc:
            return None
        if self._writer is None:
            self._writer = _writer_after(header)
        token_ids = tuple(array("i", log))
        try:
            source = self._read_grammar(header)
        except DamagedAnnex:
            return None
        params = unpack_params(header, token_ids[: header.num_prompt_tokens], source)
        output_token_ids = token_ids[header.num_prompt_tokens :]
        return SequenceSnapshot(
            params=params,
            output_token_ids=output_token_ids,
            output_logprobs=() if params.sampling.logprobs is None else self._logprobs.read(output_token_ids),
            block_table=tuple(array("i", table)),
            num_computed_tokens=header.num_computed_tokens,
            rng_position=header.rng_position,
            finish_reason=header.finish_reason,
            first_page=header.first_page,
        )

    def why_unreadable(self) -> str:
        """What keeps the newest publication from being read; empty: nothing does. For messages, after `read`."""
        header = self._newest_header()
        if header is None:
            return "it has no header with a right checksum: never published, cleared, or both headers are torn"
        if zlib.crc32(self._token_log[: header.num_tokens]) != header.tokens_crc:
            return f"the checksum of its {header.num_tokens} tokens is wrong"
        if zlib.crc32(self._block_table[: header.num_pages]) != header.table_crc:
            return f"the checksum of its block table of {header.num_pages} pages is wrong"
        try:
            self._read_grammar(header)
        except DamagedAnnex as error:
            return str(error)
        return ""

    def summarize(self) -> RecordSummary | None:
        """Request, attempt and held pages of the newest publication, at a cost that hardly grows with the sequence.

        None also for a block table that is damaged or has an impossible page: its ids are used as indices.
        """
        header = self._newest_header()
        if header is None:
            return None
        table = self._block_table[: header.num_pages].tobytes()  # what is checked is what is used
        if zlib.crc32(table) != header.table_crc:
            return None
        page_ids = np.frombuffer(table, np.int32).astype(np.int64)
        if page_ids.size and not 0 <= page_ids.min() <= page_ids.max() < self._num_arena_pages:
            return None
        return RecordSummary(
            header.request_id,
            header.attempt,
            page_ids[header.first_page :],
            header.num_computed_tokens,
            num_output_tokens=header.num_tokens - header.num_prompt_tokens,
            finish_reason=header.finish_reason,
            first_page=header.first_page,
        )

    def clear(self) -> None:
        """Ends the sequence: the slot has no valid record any more. May be called twice.

        The older header goes first: a death between the two leaves the newest state and not a stale one.
        """
        newest = self._newest_header()
        newest_slot = newest.sequence & 1 if newest is not None else 0
        for header_slot in (1 - newest_slot, newest_slot):
            start = header_slot * RECORD_HEADER_BYTES
            self._headers[start : start + PACKED_HEADER_BYTES] = bytes(PACKED_HEADER_BYTES)
        if self._annex is not None:
            self._annex.clear()
        self._writer = None

    def _write_grammar(self, params: SequenceParams) -> None:
        """Raises ValueError if there is no room for it."""
        grammar = params.sampling.grammar
        if grammar is None:
            return
        if self._annex is None:
            raise ValueError("grammar: this record has no annex to keep it in")
        try:
            self._annex.write(grammar.source.encode())
        except AnnexFull as error:
            raise ValueError(f"grammar: {error}") from error

    def _read_grammar(self, header: RecordHeader) -> bytes:
        """Raises DamagedAnnex."""
        if not has_grammar(header):
            return b""
        source = None if self._annex is None else self._annex.read()
        if source is None:
            raise DamagedAnnex("its annex, which should have the source of a grammar, is empty")
        return source

    def _require_writer(self) -> _Writer:
        if self._writer is None:
            raise RuntimeError("nothing to write to: `begin` a sequence, or `read` the one that is there, first")
        return self._writer

    def _check_page(self, page_id: int) -> None:
        if not 0 <= page_id < self._num_arena_pages:
            raise ValueError(f"page {page_id}: this arena has pages 0 to {self._num_arena_pages - 1}")

    def _num_computed_tokens(self) -> int:
        header = self._newest_header()
        return 0 if header is None else header.num_computed_tokens

    def _newest_header(self) -> RecordHeader | None:
        first, second = self._valid_header(0), self._valid_header(1)
        if first is None or second is None:
            return first or second
        return first if first.sequence > second.sequence else second

    def _valid_header(self, header_slot: int) -> RecordHeader | None:
        start = header_slot * RECORD_HEADER_BYTES
        # bytes() copies: what is checked is what is used, whoever writes meanwhile.
        header = try_unpack_header(bytes(self._headers[start : start + PACKED_HEADER_BYTES]), self._params)
        if header is None or not header.num_prompt_tokens <= header.num_tokens <= self._max_tokens:
            return None
        return header if header.first_page <= header.num_pages <= self._max_pages else None


def _writer_after(header: RecordHeader) -> _Writer:
    return _Writer(
        sequence=header.sequence,
        attempt=header.attempt,
        num_prompt_tokens=header.num_prompt_tokens,
        num_tokens=header.num_tokens,
        num_pages=header.num_pages,
        num_published_pages=header.num_pages,
        num_params_bytes=len(header.params_bytes),
        params_crc=zlib.crc32(header.params_bytes),
        first_page=header.first_page,
        tokens_crc=header.tokens_crc,
        table_crc=header.table_crc,
        end_code=header.end_code,
    )
