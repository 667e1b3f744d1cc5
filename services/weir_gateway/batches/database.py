"""A database by SQLAlchemy, SQLite or PostgreSQL, called from threads of its own that are few."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from weir.core.errors import Unavailable
from weir.runtime.config import ConfigError
from weir_gateway.batches.schema import metadata

_NUM_THREADS = 4
_BUSY_TIMEOUT_S = 30
_RETRY_AFTER_S = 1.0
_LOCK_ID = 0x57656972
_RetT = TypeVar("_RetT")


class Database:
    """Makes its tables where they are not there. SQLite's file is shared by the gateways of one host."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for a URL of another database, or one whose driver is not installed."""
        self._url = url
        self.is_sqlite = url.startswith("sqlite:")
        options: dict[str, Any] = {"connect_args": {"connect_timeout": _BUSY_TIMEOUT_S}, "pool_pre_ping": True}
        if self.is_sqlite:
            options = {"connect_args": {"timeout": _BUSY_TIMEOUT_S, "check_same_thread": False}}
        try:
            self._engine = create_engine(_with_driver(url), pool_size=_NUM_THREADS, max_overflow=0, **options)
        except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
            reason = type(error).__name__  # its text may have the password
            raise ConfigError(
                f"batch_store: {reason}: must be sqlite:///PATH or postgresql://USER@HOST/DATABASE"
            ) from None
        if self.is_sqlite:
            event.listen(self._engine, "connect", _set_up_sqlite)
            event.listen(self._engine, "begin", _begin_sqlite)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="batch store")

    def create(self) -> None:
        """Blocks. Raises Unavailable."""
        database = self._engine.url.database
        if self.is_sqlite and database:
            try:
                Path(database).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                message = f"batch_store: no folder for {database} ({error.strerror or error}); name another place"
                raise Unavailable(message, retry_after_s=_RETRY_AFTER_S) from error
        with self.begin() as connection:
            if not self.is_sqlite:  # gateways that start together would make the same tables
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK_ID})"))
            metadata.create_all(connection)
        if self.is_sqlite and database:
            Path(database).chmod(0o600)  # it holds what tenants asked

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """One transaction. Blocks. Raises Unavailable while the database is."""
        try:
            with self._engine.begin() as connection:
                yield connection
        except (DBAPIError, PoolTimeout) as error:
            problem = str(getattr(error, "orig", None) or error).splitlines()[0]
            message = f"the store of batches does not answer: {problem}"
            raise Unavailable(message, retry_after_s=_RETRY_AFTER_S) from error

    async def run(self, work: Callable[..., _RetT], *arguments: Any) -> _RetT:
        """In a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def close(self) -> None:
        """Waits for what runs."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._engine.dispose()


def _with_driver(url: str) -> str:
    scheme, mark, rest = url.partition("://")
    return f"postgresql+psycopg://{rest}" if mark and scheme in ("postgres", "postgresql") else url


def _set_up_sqlite(connection: Any, record: object) -> None:
    del record
    connection.isolation_level = None  # the driver begins nothing by itself: `_begin_sqlite` does
    for setting in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {setting}").close()


def _begin_sqlite(connection: Connection) -> None:
    """A transaction that reads first and then writes would fail where another one has written between."""
    connection.exec_driver_sql("BEGIN IMMEDIATE")
