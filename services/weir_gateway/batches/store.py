"""Batches, their lines and results, in the database.

lines   ── claim ──>  leased, with a new fence  ── finish ──>  results, once     (and the line is gone)
             ^                │ release, or the lease ends
             └────────────────┘
"""

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, and_, delete, func, insert, select, update

from weir.core.errors import FieldViolation, InvalidRequest, NotFound, QuotaExceeded
from weir_gateway.batches.database import Database
from weir_gateway.batches.files import PageAsked, find_file, page_of, try_read_part, write_file
from weir_gateway.batches.lines import BadLine, BatchLine, LineBounds, TooManyLines, read_lines
from weir_gateway.batches.records import (
    MAX_ERRORS_SHOWN,
    OPEN_STATUSES,
    BatchRecord,
    BatchStatus,
    ClaimedLine,
    FileRecord,
    LineResult,
    NewBatch,
)
from weir_gateway.batches.results import bad_line_result, ended_line_result
from weir_gateway.batches.schema import batches, lines, results

_OPEN = [status.value for status in OPEN_STATUSES]
_INSERTED_AT_ONCE = 500
_EXPIRED, _CANCELLED = "batch_expired", "batch_cancelled"


@dataclass(frozen=True, slots=True)
class BatchBounds:
    """Of one tenant, or one batch. `keeps_s`: how long a batch that ended stays, and its output files."""

    lines: LineBounds = field(default_factory=LineBounds)
    max_open: int = 16
    keeps_s: int = 30 * 86_400


class BatchStore:
    """Blocks: to be called by `Database.run`. Nobody sees another tenant's batches."""

    def __init__(self, database: Database, bounds: BatchBounds, now_s: Callable[[], float]) -> None:
        self._database = database
        self._bounds = bounds
        self._now_s = now_s

    def create(self, asked: NewBatch) -> BatchRecord:
        """Reads the input. Bad lines have their result at once; without a good one the batch has failed. Raises
        NotFound, InvalidRequest for a file that is no input or has too many lines, QuotaExceeded."""
        now_s = int(self._now_s())
        batch_id = f"batch_{uuid.uuid4().hex}"
        with self._database.begin() as connection:
            source = find_file(connection, asked.tenant, asked.input_file_id, "input_file_id")
            if source.purpose != "batch":
                problem = f"is of purpose {source.purpose!r}; upload it with purpose: batch"
                raise InvalidRequest([FieldViolation("input_file_id", problem)])
            self._check_open(connection, asked.tenant)
            row: dict[str, Any] = {
                "batch_id": batch_id,
                "tenant": asked.tenant,
                "endpoint": asked.endpoint,
                "input_file_id": asked.input_file_id,
                "completion_window": asked.completion_window,
                "metadata": asked.metadata,
                "status": BatchStatus.IN_PROGRESS.value,
                "created_s": now_s,
                "expires_s": now_s + asked.window_s,
                "num_lines": 0,
                "num_completed": 0,
                "num_failed": 0,
                "errors": [],
            }
            connection.execute(insert(batches), [row])
            self._read_input(connection, batch_id, asked)
            return _find(connection, asked.tenant, batch_id)

    def get(self, tenant: str, batch_id: str) -> BatchRecord:
        """Raises NotFound."""
        with self._database.begin() as connection:
            return _find(connection, tenant, batch_id)

    def page(self, tenant: str, asked: PageAsked) -> tuple[Sequence[BatchRecord], bool]:
        """And whether more follow. Raises InvalidRequest for an `after` that is no batch of the tenant's."""
        with self._database.begin() as connection:
            query = select(batches).where(batches.c.tenant == tenant)
            rows, has_more = page_of(connection, query, batches, "batch_id", tenant, asked)
        return [_record(row) for row in rows], has_more

    def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """What is being answered is let go of soon. Raises NotFound, InvalidRequest for one that has ended."""
        with self._database.begin() as connection:
            record = _find(connection, tenant, batch_id)
            if record.status not in OPEN_STATUSES:
                problem = f"{batch_id} is {record.status.value}: only what runs can be cancelled"
                raise InvalidRequest([FieldViolation("batch_id", problem)])
            if record.status is BatchStatus.IN_PROGRESS:
                status, now_s = BatchStatus.CANCELLING.value, int(self._now_s())
                changed = update(batches).where(batches.c.batch_id == batch_id)
                connection.execute(changed.values(status=status, cancelling_s=now_s))
            return _find(connection, tenant, batch_id)

    def claim(self, owner: str, limit: int, lease_s: float) -> list[ClaimedLine]:
        """Lines that are due, of batches that are in progress; those of every batch come on at the same pace."""
        now_s = self._now_s()
        is_open = and_(batches.c.status == BatchStatus.IN_PROGRESS.value, batches.c.expires_s > now_s)
        with self._database.begin() as connection:
            due = (
                select(lines, batches.c.tenant, batches.c.endpoint)
                .join(batches, batches.c.batch_id == lines.c.batch_id)
                .where(is_open, lines.c.due_s <= now_s)
                .order_by(lines.c.number)
                .limit(limit)
                .with_for_update(of=lines, skip_locked=True)
            )
            claimed = [_claimed(row._mapping) for row in connection.execute(due)]
            for line in claimed:
                lease = {"owner": owner, "fence": line.fence, "num_tries": line.num_tries, "due_s": now_s + lease_s}
                connection.execute(update(lines).where(_is_line(line.batch_id, line.number)).values(lease))
        return claimed

    def renew(self, owner: str, claimed: Sequence[ClaimedLine], lease_s: float) -> list[ClaimedLine]:
        """Those that are still the caller's, and of a batch that goes on. Others are to be let go of."""
        now_s = self._now_s()
        is_open = select(batches.c.batch_id).where(
            batches.c.status == BatchStatus.IN_PROGRESS.value, batches.c.expires_s > now_s
        )
        kept = []
        with self._database.begin() as connection:
            for line in claimed:
                own = and_(_is_held(line), lines.c.owner == owner, lines.c.batch_id.in_(is_open))
                if connection.execute(update(lines).where(own).values(due_s=now_s + lease_s)).rowcount:
                    kept.append(line)
        return kept

    def release(self, line: ClaimedLine, wait_s: float, counts: bool) -> None:
        """To be tried again; `counts`: as one of its tries. Nothing changes for whoever has claimed it since."""
        left = {"owner": None, "due_s": self._now_s() + wait_s, "num_tries": lines.c.num_tries - (0 if counts else 1)}
        with self._database.begin() as connection:
            if not connection.execute(update(lines).where(_is_held(line)).values(left)).rowcount:
                _uncount(connection, line)

    def finish(self, line: ClaimedLine, result: LineResult) -> bool:
        """False: somebody else has claimed the line since, or its batch has ended; nothing is written."""
        of_batch = select(batches.c.batch_id).where(batches.c.batch_id == line.batch_id)
        with self._database.begin() as connection:
            connection.execute(of_batch.with_for_update())  # before its lines, as where a batch is ended
            if not connection.execute(delete(lines).where(_is_held(line))).rowcount:
                _uncount(connection, line)
                return False
            _add_results(connection, line.batch_id, [(line.number, result)])
        return True

    def end_due(self) -> list[BatchRecord]:
        """Ends what is answered, cancelled or past its time: files are written and the status changed, at once or not
        at all. Of a batch that is cancelled what is leased ends first. One call, one gateway ends each batch."""
        query = select(batches.c.batch_id).where(batches.c.status.in_(_OPEN)).order_by(batches.c.created_s)
        with self._database.begin() as connection:
            open_ids = connection.execute(query).scalars().all()
        ended = []
        for batch_id in open_ids:
            with self._database.begin() as connection:
                record = self._try_end(connection, batch_id)
            if record is not None:
                ended.append(record)
        return ended

    def drop_old(self) -> int:
        """Batches that ended long ago. Returns their number."""
        with self._database.begin() as connection:
            old = delete(batches).where(batches.c.ended_s <= self._now_s() - self._bounds.keeps_s)
            return connection.execute(old).rowcount

    def count_open(self) -> tuple[int, int]:
        """Batches that run, and lines without a result: of all tenants, at all gateways."""
        with self._database.begin() as connection:
            of_batches = select(func.count()).select_from(batches).where(batches.c.status.in_(_OPEN))
            num_lines = connection.execute(select(func.count()).select_from(lines)).scalar_one()
            return connection.execute(of_batches).scalar_one(), num_lines

    def _check_open(self, connection: Connection, tenant: str) -> None:
        query = select(func.count()).select_from(batches)
        query = query.where(batches.c.tenant == tenant, batches.c.status.in_(_OPEN))
        num_open = connection.execute(query).scalar_one()
        if num_open >= self._bounds.max_open:
            limit = f"tenant {tenant!r} has {num_open} batches that run, of batch_max_open: {self._bounds.max_open}"
            raise QuotaExceeded(f"{limit}; wait for one to end, or cancel one", retry_after_s=60.0, tenant=tenant)

    def _read_input(self, connection: Connection, batch_id: str, asked: NewBatch) -> None:
        good: list[dict[str, Any]] = []
        bad: list[BadLine] = []
        num_good = 0
        try:
            for line in read_lines(_parts(connection, asked.input_file_id), asked.endpoint, self._bounds.lines):
                if isinstance(line, BatchLine):
                    good.append(_row_of_line(batch_id, line))
                    num_good += 1
                else:
                    bad.append(line)
                if len(good) == _INSERTED_AT_ONCE:
                    connection.execute(insert(lines), good)
                    good = []
        except TooManyLines:
            limit = f"has more than batch_max_lines: {self._bounds.lines.max_lines} lines; make several files of it"
            raise InvalidRequest([FieldViolation("input_file_id", limit)]) from None
        if good:
            connection.execute(insert(lines), good)
        if not num_good and not bad:
            raise InvalidRequest([FieldViolation("input_file_id", "has no line; give a request a line")])
        shown = [
            {"code": one.code, "line": one.number, "message": one.message, "param": one.param}
            for one in bad[:MAX_ERRORS_SHOWN]
        ]
        counted = update(batches).where(batches.c.batch_id == batch_id)
        connection.execute(counted.values(num_lines=num_good + len(bad), errors=shown))
        _add_results(connection, batch_id, [(one.number, bad_line_result(batch_id, one)) for one in bad])
        if not num_good:
            self._end(connection, _find(connection, asked.tenant, batch_id), BatchStatus.FAILED)

    def _try_end(self, connection: Connection, batch_id: str) -> BatchRecord | None:
        now_s = self._now_s()
        query = select(batches).where(batches.c.batch_id == batch_id, batches.c.status.in_(_OPEN))
        row = connection.execute(query.with_for_update()).first()
        if row is None:
            return None
        record = _record(row)
        of_batch = select(func.count()).select_from(lines).where(lines.c.batch_id == batch_id)
        is_leased = and_(lines.c.owner.is_not(None), lines.c.due_s > now_s)
        if not connection.execute(of_batch).scalar_one():
            is_cancelled = record.status is BatchStatus.CANCELLING
            return self._end(connection, record, BatchStatus.CANCELLED if is_cancelled else BatchStatus.COMPLETED)
        if record.status is BatchStatus.CANCELLING:
            if connection.execute(of_batch.where(is_leased)).scalar_one():
                return None
            self._end_lines(connection, batch_id, _CANCELLED, "the batch was cancelled before it was answered")
            return self._end(connection, record, BatchStatus.CANCELLED)
        if record.expires_s > now_s:
            return None
        problem = f"not answered within the batch's completion_window of {record.completion_window}"
        self._end_lines(connection, batch_id, _EXPIRED, problem)
        return self._end(connection, record, BatchStatus.EXPIRED)

    def _end_lines(self, connection: Connection, batch_id: str, code: str, message: str) -> None:
        """Those that have no result get an error for one."""
        gone = delete(lines).where(lines.c.batch_id == batch_id).returning(lines.c.number, lines.c.custom_id)
        left = connection.execute(gone).all()
        made = [(number, ended_line_result(batch_id, number, custom_id, code, message)) for number, custom_id in left]
        _add_results(connection, batch_id, made)

    def _end(self, connection: Connection, record: BatchRecord, status: BatchStatus) -> BatchRecord:
        """Writes the output files, of the lines in their order, and the status."""
        now_s = int(self._now_s())
        values: dict[str, Any] = {"status": status.value, "ended_s": now_s}
        for is_error, name in ((False, "output"), (True, "error")):
            mine = and_(results.c.batch_id == record.batch_id, results.c.is_error == is_error)
            if connection.execute(select(results.c.number).where(mine).limit(1)).first() is None:
                continue
            file_id = f"file-{record.batch_id.removeprefix('batch_')}-{name}"
            filename, expires_s = f"{record.batch_id}_{name}.jsonl", now_s + self._bounds.keeps_s
            made = FileRecord(file_id, record.tenant, filename, "batch_output", 0, now_s, expires_s)
            write_file(connection, made, _contents(connection, mine))
            values[f"{name}_file_id"] = file_id
        connection.execute(delete(results).where(results.c.batch_id == record.batch_id))  # the files have them
        connection.execute(update(batches).where(batches.c.batch_id == record.batch_id).values(values))
        return _find(connection, record.tenant, record.batch_id)


def _find(connection: Connection, tenant: str, batch_id: str) -> BatchRecord:
    query = select(batches).where(batches.c.batch_id == batch_id, batches.c.tenant == tenant)
    row = connection.execute(query).first()
    if row is None:
        raise NotFound("batch_id", f"batch_id: there is no batch {batch_id[:80]!r}; it may have been dropped")
    return _record(row)


def _record(row: Any) -> BatchRecord:
    return BatchRecord(**{**row._mapping, "status": BatchStatus(row.status)})


def _row_of_line(batch_id: str, line: BatchLine) -> dict[str, Any]:
    own = {"batch_id": batch_id, "number": line.number, "custom_id": line.custom_id, "body": line.body}
    return {**own, "fence": 0, "num_tries": 0, "due_s": 0.0, "owner": None}


def _claimed(row: Any) -> ClaimedLine:
    same = {name: row[name] for name in ("batch_id", "number", "custom_id", "body", "tenant", "endpoint")}
    return ClaimedLine(**same, fence=row["fence"] + 1, num_tries=row["num_tries"] + 1)


def _is_line(batch_id: str, number: int) -> Any:
    return and_(lines.c.batch_id == batch_id, lines.c.number == number)


def _is_held(line: ClaimedLine) -> Any:
    return and_(_is_line(line.batch_id, line.number), lines.c.fence == line.fence)


def _uncount(connection: Connection, line: ClaimedLine) -> None:
    """Its lease lapsed and another gateway has claimed it, while the one that had it lives: on a machine that is
    overloaded that happens again and again, and is no try that the line has felled a gateway by."""
    taken = and_(_is_line(line.batch_id, line.number), lines.c.fence > line.fence)
    connection.execute(update(lines).where(taken).values(num_tries=lines.c.num_tries - 1))


def _add_results(connection: Connection, batch_id: str, made: Sequence[tuple[int, LineResult]]) -> None:
    if not made:
        return
    rows = [
        {"batch_id": batch_id, "number": number, "is_error": result.is_error, "content": result.content}
        for number, result in made
    ]
    connection.execute(insert(results), rows)
    num_failed = sum(result.is_error for _, result in made)
    counts = {
        "num_failed": batches.c.num_failed + num_failed,
        "num_completed": batches.c.num_completed + len(made) - num_failed,
    }
    connection.execute(update(batches).where(batches.c.batch_id == batch_id).values(counts))


def _parts(connection: Connection, file_id: str) -> Iterator[bytes]:
    part = 0
    while (data := try_read_part(connection, file_id, part)) is not None:
        yield data
        part += 1


def _contents(connection: Connection, mine: Any) -> Iterator[bytes]:
    """Pages of results, in the lines' order."""
    last = 0
    while True:
        query = select(results.c.number, results.c.content).where(mine, results.c.number > last)
        rows = connection.execute(query.order_by(results.c.number).limit(_INSERTED_AT_ONCE)).all()
        if not rows:
            return
        for number, content in rows:
            last = number
            yield f"{content}\n".encode()
