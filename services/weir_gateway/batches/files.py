"""Files of tenants, in the database, in parts."""

import operator
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Row, and_, delete, desc, func, insert, or_, select

from weir.core.errors import AlreadyExists, InvalidRequest, NotFound, QuotaExceeded
from weir.core.errors import FieldViolation as Violation
from weir_gateway.batches.database import Database
from weir_gateway.batches.records import OPEN_STATUSES, FileRecord
from weir_gateway.batches.schema import batches, files, parts

PART_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PageAsked:
    """Of a list. `after`: the id of the last entry of the page before; empty: from the first."""

    after: str = ""
    limit: int = 20
    is_newest_first: bool = True


class FileStore:
    """Blocks: to be called by `Database.run`. Nobody sees another tenant's files."""

    def __init__(self, database: Database, max_tenant_bytes: int, now_s: Callable[[], float]) -> None:
        self._database = database
        self._max_tenant_bytes = max_tenant_bytes
        self._now_s = now_s

    def add(
        self, tenant: str, filename: str, purpose: str, content: Iterable[bytes], keeps_s: int | None
    ) -> FileRecord:
        """Raises QuotaExceeded where the tenant's files would hold more than they may."""
        now_s = int(self._now_s())
        expires_s = None if keeps_s is None else now_s + keeps_s
        made = FileRecord(f"file-{uuid.uuid4().hex}", tenant, filename, purpose, 0, now_s, expires_s)
        with self._database.begin() as connection:
            made = write_file(connection, made, content)
            held = select(func.sum(files.c.num_bytes)).where(files.c.tenant == tenant)
            num_bytes = connection.execute(held).scalar() or 0
            if num_bytes > self._max_tenant_bytes:  # undoes it
                limit = f"{num_bytes} bytes with this one, and may hold batch_tenant_mb: {self._max_tenant_bytes}"
                raise QuotaExceeded(f"files of tenant {tenant!r} hold {limit}; delete some of them", tenant=tenant)
        return made

    def get(self, tenant: str, file_id: str) -> FileRecord:
        """Raises NotFound."""
        with self._database.begin() as connection:
            return find_file(connection, tenant, file_id, "file_id")

    def page(self, tenant: str, asked: PageAsked, purpose: str) -> tuple[Sequence[FileRecord], bool]:
        """And whether more follow. Raises InvalidRequest for an `after` that is no file of the tenant's."""
        with self._database.begin() as connection:
            query = select(files).where(files.c.tenant == tenant)
            if purpose:
                query = query.where(files.c.purpose == purpose)
            rows, has_more = page_of(connection, query, files, "file_id", tenant, asked)
        return [file_of(row) for row in rows], has_more

    def parts_of(self, file_id: str) -> Iterator[bytes]:
        """Each is read by itself; a file that is deleted meanwhile ends."""
        part = 0
        while (data := self.try_part(file_id, part)) is not None:
            yield data
            part += 1

    def try_part(self, file_id: str, part: int) -> bytes | None:
        """None: it has no more."""
        with self._database.begin() as connection:
            return try_read_part(connection, file_id, part)

    def delete(self, tenant: str, file_id: str) -> None:
        """Raises NotFound, and AlreadyExists while a batch that runs has it for its input."""
        with self._database.begin() as connection:
            find_file(connection, tenant, file_id, "file_id")
            used = select(batches.c.batch_id).where(
                batches.c.input_file_id == file_id, batches.c.status.in_([one.value for one in OPEN_STATUSES])
            )
            batch_id = connection.execute(used).scalar()
            if batch_id is not None:
                raise AlreadyExists("file_id", f"file_id: {file_id} is the input of {batch_id}, which runs; cancel it")
            connection.execute(delete(files).where(files.c.file_id == file_id))

    def drop_expired(self) -> int:
        """Inputs of batches that run stay. Returns their number."""
        used = select(batches.c.input_file_id).where(batches.c.status.in_([one.value for one in OPEN_STATUSES]))
        with self._database.begin() as connection:
            old = delete(files).where(files.c.expires_s <= self._now_s(), files.c.file_id.not_in(used))
            return connection.execute(old).rowcount


def write_file(connection: Connection, record: FileRecord, content: Iterable[bytes]) -> FileRecord:
    """In the caller's transaction; `content` in pieces of any size. Returns it with its bytes counted."""
    connection.execute(insert(files), [_row_of(record)])
    num_bytes = 0
    for number, data in enumerate(_in_parts(content)):
        connection.execute(insert(parts), [{"file_id": record.file_id, "part": number, "data": data}])
        num_bytes += len(data)
    connection.execute(files.update().where(files.c.file_id == record.file_id).values(num_bytes=num_bytes))
    return replace(record, num_bytes=num_bytes)


def find_file(connection: Connection, tenant: str, file_id: str, field: str) -> FileRecord:
    """Raises NotFound."""
    row = connection.execute(select(files).where(files.c.file_id == file_id, files.c.tenant == tenant)).first()
    if row is None:
        raise NotFound(field, f"{field}: there is no file {file_id[:80]!r}; it may have expired, or been deleted")
    return file_of(row)


def try_read_part(connection: Connection, file_id: str, part: int) -> bytes | None:
    """None: it has no more."""
    query = select(parts.c.data).where(parts.c.file_id == file_id, parts.c.part == part)
    data = connection.execute(query).scalar()
    return None if data is None else bytes(data)


def page_of(
    connection: Connection, query: Any, table: Any, id_name: str, tenant: str, asked: PageAsked
) -> tuple[Sequence[Row[Any]], bool]:
    """Rows of `query` in the order of their making, and whether more follow."""
    id_column = table.c[id_name]
    if asked.after:
        of_last = select(table.c.created_s).where(id_column == asked.after, table.c.tenant == tenant)
        last_s = connection.execute(of_last).scalar()
        if last_s is None:
            raise InvalidRequest([Violation("after", f"there is no {asked.after[:80]!r}; give the id of a last entry")])
        is_past: Callable[[Any, Any], Any] = operator.lt if asked.is_newest_first else operator.gt
        same_second = and_(table.c.created_s == last_s, is_past(id_column, asked.after))
        query = query.where(or_(is_past(table.c.created_s, last_s), same_second))
    order = [table.c.created_s, id_column]
    query = query.order_by(*(map(desc, order) if asked.is_newest_first else order)).limit(asked.limit + 1)
    rows = connection.execute(query).all()
    return rows[: asked.limit], len(rows) > asked.limit


def file_of(row: Row[Any]) -> FileRecord:
    return FileRecord(**row._mapping)


def _row_of(record: FileRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in FileRecord.__slots__}


def _in_parts(content: Iterable[bytes]) -> Iterator[bytes]:
    held = bytearray()
    for piece in content:
        held += piece
        while len(held) >= PART_BYTES:
            yield bytes(held[:PART_BYTES])
            del held[:PART_BYTES]
    if held:
        yield bytes(held)
