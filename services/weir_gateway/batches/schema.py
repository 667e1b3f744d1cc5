"""The tables, the same in SQLite and PostgreSQL."""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

metadata = MetaData()

files = Table(
    "weir_files",
    metadata,
    Column("file_id", String(64), primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("created_s", BigInteger, nullable=False),
    Column("expires_s", BigInteger),
    Index("weir_files_of_tenant", "tenant", "created_s"),
)

parts = Table(
    "weir_file_parts",
    metadata,
    Column("file_id", ForeignKey("weir_files.file_id", ondelete="CASCADE"), primary_key=True),
    Column("part", Integer, primary_key=True),
    Column("data", LargeBinary, nullable=False),
)

batches = Table(
    "weir_batches",
    metadata,
    Column("batch_id", String(64), primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("input_file_id", String(64), nullable=False),
    Column("completion_window", String(16), nullable=False),
    Column("metadata", JSON),
    Column("status", String(16), nullable=False),
    Column("created_s", BigInteger, nullable=False),
    Column("expires_s", BigInteger, nullable=False),
    Column("num_lines", Integer, nullable=False),
    Column("num_completed", Integer, nullable=False),
    Column("num_failed", Integer, nullable=False),
    Column("errors", JSON, nullable=False),
    Column("cancelling_s", BigInteger),
    Column("ended_s", BigInteger),
    Column("output_file_id", String(64)),
    Column("error_file_id", String(64)),
    Index("weir_batches_of_tenant", "tenant", "created_s"),
    Index("weir_batches_by_status", "status"),
)

# Lines that have no result yet. `due_s`: from when anybody may claim it, which is when the lease of a claimed one ends.
lines = Table(
    "weir_batch_lines",
    metadata,
    Column("batch_id", ForeignKey("weir_batches.batch_id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("custom_id", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("fence", Integer, nullable=False),
    Column("num_tries", Integer, nullable=False),
    Column("due_s", Float, nullable=False),
    Column("owner", String(64)),
    Index("weir_batch_lines_due", "number", "due_s"),
)

# The primary key is what makes a second result of a line impossible.
results = Table(
    "weir_batch_results",
    metadata,
    Column("batch_id", ForeignKey("weir_batches.batch_id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("is_error", Boolean, nullable=False),
    Column("content", Text, nullable=False),
)
