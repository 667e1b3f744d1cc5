"""`Admin`: `Describe`, which every process serves (its counters, and what its own checks find), and what operators ask
of the process that can do it."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio

from weir.core.errors import FieldViolation, InvalidRequest
from weir.rpc.figures import histogram_to_pb, page_map_to_pb, step_to_pb
from weir.telemetry.described import Described, HistogramFigure
from weir.telemetry.internals import MAX_PAGE_RANGES, MAX_STEPS, ListSteps, MapPages
from weir.wire.v1 import admin_pb2, admin_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Description:
    """What a component says about itself: counters (`…_total`) and gauges, and how to find what is wrong."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    check_integrity: Callable[[], Sequence[str]] = tuple
    """Apart, since it takes milliseconds where there is much to check. To be called before anything else happens."""
    role: str = ""
    """Where it is not the one that the process was started in."""
    histograms: Sequence[HistogramFigure] = ()
    list_steps: ListSteps | None = None
    """Of workers alone."""
    map_pages: MapPages | None = None
    """Of transfer services alone."""

    @property
    def integrity_errors(self) -> tuple[str, ...]:
        """Found now: a sentence each."""
        return tuple(self.check_integrity())


class Operations(Protocol):
    """What operators ask. Methods raise WeirErrors; `context` says who asks."""

    async def list_workers(self, context: "Context") -> admin_pb2.ListWorkersResponse: ...

    async def drain(self, request: admin_pb2.DrainRequest, context: "Context") -> admin_pb2.DrainResponse: ...

    async def end_drain(self, request: admin_pb2.EndDrainRequest, context: "Context") -> admin_pb2.EndDrainResponse: ...

    async def set_role(self, request: admin_pb2.SetRoleRequest, context: "Context") -> admin_pb2.SetRoleResponse: ...

    async def set_limits(
        self, request: admin_pb2.AdminSetLimitsRequest, context: "Context"
    ) -> admin_pb2.AdminSetLimitsResponse: ...


@dataclass(frozen=True)
class Identity:
    """Who a process is."""

    role: str
    process_id: str
    model: str


class LoopErrors:
    """Counts and logs exceptions that no task's owner collected."""

    def __init__(self) -> None:
        self.num_errors = 0

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """For `loop.set_exception_handler`."""
        del loop
        self.num_errors += 1
        _log.error("uncollected: %s", context.get("message"), exc_info=context.get("exception"))


class AdminService(admin_pb2_grpc.AdminServicer):
    """Answers from the moment the process is alive; before the component is built there are only its own metrics."""

    def __init__(self, identity: Identity, describe: Callable[[], Description]) -> None:
        self._identity = identity
        self._describe = describe
        self._started_at_s = time.monotonic()
        self._operations: Operations | None = None

    def figures(self) -> Described:
        """What `Describe` would say now, but for the integrity."""
        found = self._describe()
        role = found.role or self._identity.role
        return Described(role, self._identity.process_id, found.metrics, found.histograms)

    def answer_operators(self, operations: Operations) -> None:
        """From now on; until then their calls are UNIMPLEMENTED."""
        self._operations = operations

    async def Describe(  # noqa: N802 - the method's name on the wire
        self,
        request: admin_pb2.DescribeRequest,
        context: "grpc.aio.ServicerContext[admin_pb2.DescribeRequest, admin_pb2.DescribeResponse]",
    ) -> admin_pb2.DescribeResponse:
        del context
        description = self._describe()
        return admin_pb2.DescribeResponse(
            role=description.role or self._identity.role,
            process_id=self._identity.process_id,
            pid=os.getpid(),
            model=self._identity.model,
            uptime_ms=int((time.monotonic() - self._started_at_s) * 1000),
            metrics=description.metrics,
            integrity_errors=() if request.figures_only else description.integrity_errors,
            histograms=map(histogram_to_pb, description.histograms),
        )

    async def ListSteps(  # noqa: N802 - the method's name on the wire
        self, request: admin_pb2.ListStepsRequest, context: Context
    ) -> admin_pb2.ListStepsResponse:
        list_steps = self._describe().list_steps
        if list_steps is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"this is a {self._identity.role}: ask a worker")
        _check_number("max_steps", request.max_steps, MAX_STEPS)
        return admin_pb2.ListStepsResponse(steps=map(step_to_pb, list_steps(request.max_steps)))

    async def MapPages(  # noqa: N802 - the method's name on the wire
        self, request: admin_pb2.MapPagesRequest, context: Context
    ) -> admin_pb2.MapPagesResponse:
        map_pages = self._describe().map_pages
        if map_pages is None:
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED, f"this is a {self._identity.role}: ask a transfer service"
            )
        _check_number("max_ranges", request.max_ranges, MAX_PAGE_RANGES)
        return page_map_to_pb(map_pages(request.max_ranges))

    async def SetLimits(  # noqa: N802 - the method's name on the wire
        self, request: admin_pb2.AdminSetLimitsRequest, context: Context
    ) -> admin_pb2.AdminSetLimitsResponse:
        return await (await self._need_operations(context)).set_limits(request, context)

    async def ListWorkers(  # noqa: N802 - the method's name on the wire
        self, request: admin_pb2.ListWorkersRequest, context: Context
    ) -> admin_pb2.ListWorkersResponse:
        del request
        return await (await self._need_operations(context)).list_workers(context)

    async def Drain(  # noqa: N802 - the method's name on the wire
        self, request: admin_pb2.DrainRequest, context: Context
    ) -> admin_pb2.DrainResponse:
        return await (await self._need_operations(context)).drain(request, context)

    async def EndDrain(  # noqa: N802 - the method's name on the wire
        self, request: admin_pb2.EndDrainRequest, context: Context
    ) -> admin_pb2.EndDrainResponse:
        return await (await self._need_operations(context)).end_drain(request, context)

    async def SetRole(  # noqa: N802 - the method's name on the wire
        self, request: admin_pb2.SetRoleRequest, context: Context
    ) -> admin_pb2.SetRoleResponse:
        return await (await self._need_operations(context)).set_role(request, context)

    async def _need_operations(self, context: Context) -> Operations:
        if self._operations is None:
            message = f"this is a {self._identity.role}: ask the leading scheduler"
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, message)
        return self._operations


def _check_number(name: str, number: int, highest: int) -> None:
    """Raises InvalidRequest."""
    if not 1 <= number <= highest:
        raise InvalidRequest([FieldViolation(name, f"is {number}, must be in [1, {highest}]")])
