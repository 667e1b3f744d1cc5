"""The batches of one gateway, wired: database, stores and runner, their settings, start and end."""

import time
from dataclasses import dataclass, field

from weir.core.errors import NotFound
from weir_gateway.batches.database import Database
from weir_gateway.batches.files import FileStore
from weir_gateway.batches.runner import Answerer, BatchRunner, RunnerSettings, Stores
from weir_gateway.batches.store import BatchBounds, BatchStore


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """`url` of the database; empty: there are no batches."""

    url: str = ""
    max_file_bytes: int = 64 << 20
    max_tenant_bytes: int = 1 << 30
    bounds: BatchBounds = field(default_factory=BatchBounds)
    runner: RunnerSettings = field(default_factory=RunnerSettings)


class BatchJobs:
    """One a gateway."""

    def __init__(self, gateway_id: str, settings: BatchSettings, answerer: Answerer) -> None:
        """Raises ConfigError for a database that there is not."""
        self.settings = settings
        self.database = Database(settings.url)
        self.files = FileStore(self.database, settings.max_tenant_bytes, time.time)
        self.batches = BatchStore(self.database, settings.bounds, time.time)
        stores = Stores(self.database, self.batches, self.files)
        self.runner = BatchRunner(gateway_id, stores, answerer, settings.runner)

    @classmethod
    def try_make(cls, gateway_id: str, settings: BatchSettings, answerer: Answerer) -> "BatchJobs | None":
        """None: they are switched off."""
        return cls(gateway_id, settings, answerer) if settings.url else None

    async def stop(self) -> None:
        """Blocks for what the database does now."""
        await self.runner.stop()
        self.database.close()


def jobs_of(jobs: BatchJobs | None) -> BatchJobs:
    """Raises NotFound where they are switched off."""
    if jobs is None:
        raise NotFound("batch_store", "batch_store is off: this gateway keeps no files and no batches")
    return jobs
