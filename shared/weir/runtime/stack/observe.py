"""`weir status`: a stack as its state file and its processes themselves describe it."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import grpc.aio

from weir.core.credentials import key_metadata
from weir.core.errors import PermissionDenied, Unauthenticated, WeirError
from weir.rpc.errors import from_rpc_error
from weir.runtime.stack.credentials import HostCredentials
from weir.runtime.stack.paths import InstancePaths
from weir.runtime.stack.processes import is_running
from weir.runtime.stack.readiness import open_channel
from weir.runtime.stack.state import ProcessState, try_read_state
from weir.wire.v1 import admin_pb2, admin_pb2_grpc

_DESCRIBE_S = 3.0

Condition = Literal["starting", "ready", "restarting", "stopping", "stopped", "dead", "silent"]


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """One process. `dead`: gone, with nobody to restart it; `silent`: runs, but does not answer."""

    name: str
    role: str
    pid: int | None
    state: Condition
    num_restarts: int
    uptime_s: float
    address: str
    log_path: str
    metrics_url: str = ""
    model: str = ""
    process_id: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    integrity_errors: tuple[str, ...] = ()
    refusal: str = ""
    """Why it says nothing of itself, though it answers."""

    @property
    def duty(self) -> str:
        """Of a worker that takes no work at the moment; empty for all others."""
        return next((duty for duty in ("drained", "draining") if self.metrics.get(f"is_{duty}")), "")


@dataclass(frozen=True, slots=True)
class StackReport:
    """One instance. `supervisor_pid` is None when the supervisor was killed: then nothing is restarted."""

    instance: str
    state: Literal["starting", "ready", "stopping", "orphaned"]
    supervisor_pid: int | None
    uptime_s: float
    endpoints: Mapping[str, str]
    processes: tuple[ProcessReport, ...]

    @property
    def is_well(self) -> bool:
        return self.state == "ready" and all(
            process.state == "ready" and not process.integrity_errors for process in self.processes
        )


async def try_observe(paths: InstancePaths) -> StackReport | None:
    """None when nothing of the instance runs. Answers within a few seconds, whatever the processes do."""
    state = try_read_state(paths.state_file)
    if state is None:
        return None
    is_supervised = is_running(state.supervisor)
    admin_key = paths.try_read_admin_key() or ""
    reports = await asyncio.gather(
        *(_observe_process(process, admin_key, is_supervised=is_supervised) for process in state.processes)
    )
    if not is_supervised and all(report.state == "dead" for report in reports):
        return None
    return StackReport(
        instance=state.instance,
        state=state.phase if is_supervised else "orphaned",
        supervisor_pid=state.supervisor.pid if is_supervised else None,
        uptime_s=_seconds_since(state.started_at),
        endpoints=state.endpoints,
        processes=tuple(reports),
    )


async def _observe_process(process: ProcessState, admin_key: str, *, is_supervised: bool) -> ProcessReport:
    runs = process.identity is not None and is_running(process.identity)
    condition = _condition(process, runs=runs, is_supervised=is_supervised)
    described, refusal = admin_pb2.DescribeResponse(), ""
    if runs and process.address and process.role != "nats":
        try:
            described = await _describe(process, _key_for(process, admin_key))
        except WeirError as error:
            if isinstance(error, Unauthenticated | PermissionDenied):
                refusal = error.message
            elif condition == "ready":
                condition = "silent"
    return ProcessReport(
        name=process.name,
        role=described.role or process.role,
        pid=process.identity.pid if process.identity is not None and runs else None,
        state=condition,
        num_restarts=process.num_restarts,
        uptime_s=_seconds_since(process.started_at) if runs else 0.0,
        address=process.address,
        log_path=process.log_path,
        metrics_url=process.metrics_url,
        model=process.model,
        process_id=described.process_id,
        metrics=dict(described.metrics),
        integrity_errors=tuple(described.integrity_errors),
        refusal=refusal,
    )


def _condition(process: ProcessState, *, runs: bool, is_supervised: bool) -> Condition:
    """As the state file says, but that of a death its supervisor learns a moment later than who looks."""
    if runs:
        return process.phase
    if not is_supervised:
        return "dead"
    return "restarting" if process.phase == "ready" else process.phase


async def try_describe(process: ProcessState, admin_key: str = "") -> admin_pb2.DescribeResponse | None:
    """None: it does not answer, or not to who shows this key."""
    try:
        return await _describe(process, _key_for(process, admin_key))
    except WeirError:
        return None


def _key_for(process: ProcessState, admin_key: str) -> str:
    """Gateways tell operators alone how they do; no other process needs the key, or gets it."""
    return admin_key if process.role == "gateway" else ""


async def _describe(process: ProcessState, admin_key: str) -> admin_pb2.DescribeResponse:
    """Raises WeirError."""
    shared = HostCredentials(Path(process.credentials)) if process.credentials else None
    certificate = None if shared is None else shared.certificate(process.role)
    async with open_channel(process.address, Path(process.ready_file), certificate) as channel:
        stub: admin_pb2_grpc.AdminAsyncStub = admin_pb2_grpc.AdminStub(channel)
        try:
            return await stub.Describe(
                admin_pb2.DescribeRequest(), timeout=_DESCRIBE_S, metadata=key_metadata(admin_key)
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


def _seconds_since(moment: float) -> float:
    return round(max(0.0, time.time() - moment), 1)
