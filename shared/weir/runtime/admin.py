"""`Admin`, which every process serves: its counters, what its own checks find, and the changes that its role takes."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from weir.wire.v1 import admin_pb2, admin_pb2_grpc

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Description:
    """What a component says about itself: counters (`…_total`) and gauges, and what check_integrity() found wrong."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    integrity_errors: tuple[str, ...] = ()


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


SetLimits = Callable[
    [admin_pb2.AdminSetLimitsRequest, "grpc.aio.ServicerContext[Any, Any]"],
    Awaitable[admin_pb2.AdminSetLimitsResponse],
]


class AdminService(admin_pb2_grpc.AdminServicer):
    """Answers from the moment the process is alive; before the component is built there are only its own metrics."""

    def __init__(self, identity: Identity, describe: Callable[[], Description]) -> None:
        self._identity = identity
        self._describe = describe
        self.set_limits: SetLimits | None = None
        """Of the one role that takes them."""
        self._started_at_s = time.monotonic()

    async def Describe(  # noqa: N802 - the method's name on the wire
        self,
        request: admin_pb2.DescribeRequest,
        context: "grpc.aio.ServicerContext[admin_pb2.DescribeRequest, admin_pb2.DescribeResponse]",
    ) -> admin_pb2.DescribeResponse:
        del request, context
        description = self._describe()
        return admin_pb2.DescribeResponse(
            role=self._identity.role,
            process_id=self._identity.process_id,
            pid=os.getpid(),
            model=self._identity.model,
            uptime_ms=int((time.monotonic() - self._started_at_s) * 1000),
            metrics=description.metrics,
            integrity_errors=description.integrity_errors,
        )

    async def SetLimits(  # noqa: N802 - the method's name on the wire
        self,
        request: admin_pb2.AdminSetLimitsRequest,
        context: "grpc.aio.ServicerContext[admin_pb2.AdminSetLimitsRequest, admin_pb2.AdminSetLimitsResponse]",
    ) -> admin_pb2.AdminSetLimitsResponse:
        if self.set_limits is None:
            problem = f"a {self._identity.role} process takes no limits: ask the leading scheduler"
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, problem)
        return await self.set_limits(request, context)
