"""Builds and starts a worker up to its lease, in a process of its own that has not imported torch before.

Arguments: device, precision and model. Prints what happened, in order.
"""

import asyncio
import importlib.abc
import importlib.machinery
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import grpc.aio
from opentelemetry.trace import NoOpTracer

from weir.rpc.arena.client import ArenaClient
from weir.runtime.admin import AdminService, Description, Identity
from weir.runtime.service import ServiceContext
from weir.worker import assembly
from weir.worker.config import WorkerConfig
from weir.worker.requests.request_manager import RequestLimits
from weir.worker.roles.prefill import PrefillRole

_SLOWER_S = 1.0
"""So much longer an import takes: whoever does not wait for it is sure to be first."""


def report(event: str) -> None:
    sys.stdout.write(f"{event}\n")


class Attached(Exception):
    """The worker has asked for a lease; nothing after that matters here."""


class ReportingArena(ArenaClient):
    async def start(self, timeout_s: float = 120.0) -> None:
        del timeout_s
        report("attach")
        raise Attached


class SlowImports(importlib.abc.MetaPathFinder):
    """Of the named modules."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert isinstance(spec.loader, importlib.abc.Loader)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            time.sleep(_SLOWER_S)
            execute(module)
            report(f"import {name}")

        setattr(spec.loader, "exec_module", exec_module)  # noqa: B010 - a method, to the type checker
        return spec


async def start_worker(config: WorkerConfig) -> None:
    admin = AdminService(Identity("prefill", "prefill-0", ""), Description)
    context = ServiceContext(config, "prefill", "prefill-0", "", grpc.aio.server(), NoOpTracer(), print, admin)

    limits = RequestLimits(max_live=8, takes_hand_offs=False)
    model = await assembly.load_worker_model(config)
    worker = assembly.make_shell(context, model, limits, lambda parts: PrefillRole(parts, context.tracer))
    try:
        await worker.start()
    except Attached:
        return


def main() -> None:
    device, precision, model = sys.argv[1:]
    sys.meta_path.insert(0, SlowImports(["torch", "triton", "numba", "scipy.linalg"]))
    setattr(assembly, "ArenaClient", ReportingArena)  # noqa: B010 - a class, to the type checker
    with tempfile.TemporaryDirectory(prefix="weir-") as folder:
        settings = {"device": device, "precision": precision, "model": model}
        asyncio.run(start_worker(WorkerConfig(runtime_dir=Path(folder), **settings)))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
