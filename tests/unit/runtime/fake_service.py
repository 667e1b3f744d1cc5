"""A service that does next to nothing, on the real spine: `weir.v1.Inference` with Tokenize alone."""

import asyncio
import contextlib
import gc
import os
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentelemetry import trace

from weir.core.errors import FieldViolation, InvalidRequest, Unavailable
from weir.core.trusted_folder import UntrustedFolder
from weir.model.errors import ModelError
from weir.rpc.access import Callers
from weir.rpc.body_budget import BodyBudget
from weir.rpc.port_guard import PortGuard, PortLimits
from weir.runtime.config import ConfigError, ServiceConfig, load_config, setting
from weir.runtime.service import Description, ServiceContext, run_service
from weir.wire.v1 import inference_pb2, inference_pb2_grpc


@dataclass(frozen=True)
class FakeConfig(ServiceConfig):
    """A fake service."""

    start_s: float = setting(0.0, "Seconds of warm-up.")
    drain_s: float = setting(0.0, "Seconds that draining takes, unless a request ends it.")
    fail: str = setting("", "What goes wrong: build, setting, model, start, defect, drain, thread.")
    events_file: str = setting("", "Where to write what happens.")


class FakeService(inference_pb2_grpc.InferenceServicer):
    def __init__(self, context: ServiceContext[FakeConfig]) -> None:
        self._context = context
        self._config = context.config
        self._is_drained = asyncio.Event()

    async def Tokenize(  # noqa: N802 - the method's name on the wire
        self, request: inference_pb2.TokenizeRequest, context: Any
    ) -> inference_pb2.TokenizeResponse:
        match request.text:
            case "bad":
                raise InvalidRequest([FieldViolation("text", "is bad")])
            case "defect":
                raise KeyError("nobody thought of this")
            case "shut down":
                self._context.request_shutdown("asked by a request")
            case "drained":
                self._is_drained.set()
            case "uncollected":
                asyncio.get_running_loop().call_soon(lambda: 1 // 0)
            case "frozen":
                return inference_pb2.TokenizeResponse(token_ids=[gc.get_freeze_count(), len(gc.get_objects())])
        return inference_pb2.TokenizeResponse(token_ids=[len(request.text)])

    async def start(self) -> None:
        self._note("start")
        await asyncio.sleep(self._config.start_s)
        if self._config.fail == "start":
            raise Unavailable("no arena at unix:/nowhere")
        if self._config.fail == "defect":
            raise ZeroDivisionError("a defect")

    async def drain(self, deadline_s: float) -> None:
        self._note(f"drain {deadline_s:g}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_drained.wait(), self._config.drain_s)
        if self._config.fail == "drain":
            raise RuntimeError("drain broke")

    async def stop(self) -> None:
        self._note("stop")
        if self._config.fail == "thread":
            threading.Thread(target=threading.Event().wait).start()
        with self._context.tracer.start_as_current_span("last words"):
            self._note(f"recording {trace.get_current_span().is_recording()}")

    def release(self) -> None:
        self._note(f"released, still served: {self._is_served()}")

    def _is_served(self) -> bool:
        address = self._context.address
        is_unix = address.startswith("unix:")
        host, _, port = address.rpartition(":")
        with socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET) as asking:
            return asking.connect_ex(address.removeprefix("unix:") if is_unix else (host, int(port))) == 0

    def describe(self) -> Description:
        return Description({"fakes_total": 3.0}, lambda: ("one page is missing",))

    def _note(self, event: str) -> None:
        if self._config.events_file:
            with Path(self._config.events_file).open("a") as events:
                events.write(event + "\n")


async def build(context: ServiceContext[FakeConfig]) -> FakeService:
    if context.config.fail == "build":
        raise Unavailable("the arena cannot be made")
    if context.config.fail == "setting":
        raise ConfigError("arena_bytes 5: too small")
    if context.config.fail == "model":
        raise ModelError("no model 'm'")
    if context.config.fail == "folder":
        raise UntrustedFolder("/cache/kernels has mode 0777")
    service = FakeService(context)  # type: ignore[abstract]  # what it lacks is UNIMPLEMENTED
    context.resources.callback(service.release)
    inference_pb2_grpc.add_InferenceServicer_to_server(service, context.grpc_server)
    for callers in (Callers.TENANT, Callers.OPERATOR):
        context.access.answer(callers, lambda _: None)
    return service


def main() -> int:
    config = load_config(FakeConfig, sys.argv[1:], environ=os.environ)
    guard = PortGuard(PortLimits(1 << 20, max_calls=64), BodyBudget(1 << 26))
    return run_service("gateway", config, build, ["weir.v1.Inference"], guard)


if __name__ == "__main__":
    sys.exit(main())
