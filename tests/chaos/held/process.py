"""What a process of the held stack runs: each service as it is, but that the model is a hash over the pages of the real
arena, and that a gate stops a worker's steps where a test wants them to stand still."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from tests.chaos.held.gate import Gate, Order
from tests.unit.gateway.fake_model import MAX_CONTEXT, VOCAB_SIZE, byte_model

from weir.bus.nats import NatsBus
from weir.bus.protocol import Bus
from weir.engine.memory.swapping import HostPages
from weir.engine.plan import StepPlan
from weir.kv.geometry import PAGE_TOKENS
from weir.kv.memory.device import ArenaMemory
from weir.kv.messages import HandedOff
from weir.rpc.access import Callers
from weir.rpc.arena.client import ArenaClient, WorkerIdentity
from weir.rpc.body_budget import BodyBudget
from weir.rpc.port_guard import PortGuard, PortLimits
from weir.runtime.config import load_config
from weir.runtime.service import ServiceContext, run_service
from weir.testing.runner import HashRunner
from weir.wire.v1 import inference_pb2, inference_pb2_grpc, worker_pb2_grpc
from weir.worker.arena.arena import Arena
from weir.worker.config import WorkerConfig
from weir.worker.engine.model_loading import LoadedModel, ModelSpec
from weir.worker.requests.request_manager import RequestLimits
from weir.worker.requests.servicer import SERVICE_NAME as WORKER_SERVICE
from weir.worker.role import Role, RoleParts
from weir.worker.roles.config import DecodeConfig, PrefillConfig
from weir.worker.roles.decode import DecodeRole
from weir.worker.roles.prefill import PrefillRole
from weir.worker.shell import ShellOutside, WorkerShell
from weir_gateway.config import GatewayConfig
from weir_gateway.frontends.grpc_frontend import InferenceServicer
from weir_gateway.gateway import GatewayComponent, GatewayLoaders, GatewayProcess
from weir_gateway.settings import GatewaySettings
from weir_scheduler.__main__ import main as run_scheduler
from weir_transfer.__main__ import main as run_transfer

PAGE_BYTES = 4096
"""The first 16 numbers of 64 bits are used: larger pages make the arena's size exact."""
MODEL_DIGEST = "hash"
_GATEWAY_GONE_S = 0.5
_MAX_HELD_S = 60.0
_BUS_CONNECT_TIMEOUT_S = 60.0  # as in weir.worker.assembly
_ConfigT = TypeVar("_ConfigT", bound=WorkerConfig)
_GATEWAY_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


class WatchedPages(HostPages):
    """Knows whether any was swapped out."""

    def __init__(self, pages: npt.NDArray[np.uint8]) -> None:
        super().__init__(pages)
        self.has_swapped = False

    def read(self, page_id: int) -> npt.NDArray[np.uint8]:
        self.has_swapped = True
        return super().read(page_id)


class GatedSteps:
    """Stops steps in the engine's thread, as the gate says. For all others such a step is under way."""

    def __init__(self, gate: Gate, pages: WatchedPages) -> None:
        self._gate = gate
        self._pages = pages
        self._order_name = ""
        self._num_steps = 0

    def wait(self, plan: StepPlan) -> None:
        ends_at_s = time.monotonic() + _MAX_HELD_S
        while (order := self._gate.try_read()) is not None and time.monotonic() < ends_at_s:
            if order.name != self._order_name:
                self._order_name, self._num_steps, self._pages.has_swapped = order.name, 0, bool(plan.swap.outs)
            if self._may_pass(order, plan):
                break
            self._gate.mark_held(order)
            time.sleep(0.005)
        self._num_steps += 1

    def _may_pass(self, order: Order, plan: StepPlan) -> bool:
        if order.swapped_seed is None:
            return self._num_steps < order.num_steps
        # What this step copies is recorded after it: the next one finds it swapped out.
        is_amid_swap = bool(plan.swap.outs) or not self._pages.has_swapped
        return is_amid_swap or any(
            chunk.sample and chunk.sample.params.seed == order.swapped_seed for chunk in plan.chunks
        )


async def _build_worker(context: ServiceContext[_ConfigT], make_role: Callable[[RoleParts], Role]) -> WorkerShell:
    config, gate = context.config, Gate(context.config.runtime_dir, context.role)

    def make_arena(on_handed_off: Callable[[HandedOff], None]) -> Arena:
        socket, worker_id = config.arena_socket_path, context.process_id
        identity = WorkerIdentity(worker_id, context.role, PAGE_BYTES, MODEL_DIGEST)
        return ArenaClient(socket, identity, on_handed_off)

    def load_model(memory: ArenaMemory) -> LoadedModel:
        pages = memory.segment.pages
        watched = WatchedPages(pages)
        runner = HashRunner(
            len(pages), VOCAB_SIZE, GatedSteps(gate, watched).wait, pages.view(np.int64)[:, :PAGE_TOKENS]
        )
        return LoadedModel(runner, lambda: None, watched)

    async def connect_bus() -> Bus:
        return await NatsBus.connect(config.nats_url, name=context.process_id, timeout_s=_BUS_CONNECT_TIMEOUT_S)

    shell = WorkerShell(
        context,
        ModelSpec("bytes", VOCAB_SIZE, MAX_CONTEXT, MODEL_DIGEST, PAGE_BYTES),
        RequestLimits(max_live=16, takes_hand_offs=context.role == "decode", gateway_gone_s=_GATEWAY_GONE_S),
        make_role,
        ShellOutside(make_arena, load_model, connect_bus),
    )
    worker_pb2_grpc.add_WorkerServicer_to_server(shell.servicer, context.grpc_server)
    return shell


async def _build_prefill(context: ServiceContext[PrefillConfig]) -> WorkerShell:
    return await _build_worker(context, lambda parts: PrefillRole(parts, context.tracer))


async def _build_decode(context: ServiceContext[DecodeConfig]) -> WorkerShell:
    return await _build_worker(context, lambda parts: DecodeRole(parts, context.config, context.tracer))


def _run_gateway() -> int:
    config = load_config(GatewayConfig, sys.argv[1:], environ=os.environ)
    bodies = BodyBudget(config.max_bodies_bytes, sure_bytes=config.message_bytes)
    guard = PortGuard(PortLimits(config.message_bytes, config.max_calls), bodies)

    async def build(context: ServiceContext[GatewayConfig]) -> GatewayComponent:
        async def connect() -> Bus:
            return await NatsBus.connect(config.nats_url, name=context.process_id)

        process = GatewayProcess(context.process_id, context.tracer, bodies, context.request_shutdown)
        component = GatewayComponent(
            process, GatewaySettings.of(config), GatewayLoaders(connect, lambda: [byte_model()])
        )
        servicer = InferenceServicer(lambda: component.gateway.processor)
        context.access.answer(Callers.TENANT, servicer.identify)
        context.access.answer(Callers.OPERATOR, servicer.check_operator)
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, context.grpc_server)
        return component

    return run_service("gateway", config, build, (_GATEWAY_SERVICE,), guard)


def run_role(role: str, arguments: list[str], log_path: Path) -> None:
    """In a process of its own, which ends with the service's exit code."""
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    sys.argv = [f"weir_{role}", *arguments]
    sys.exit(_MAINS[role]())


def _run_prefill() -> int:
    config = load_config(PrefillConfig, sys.argv[1:], environ=os.environ)
    return run_service("prefill", config, _build_prefill, [WORKER_SERVICE])


def _run_decode() -> int:
    config = load_config(DecodeConfig, sys.argv[1:], environ=os.environ)
    return run_service("decode", config, _build_decode, [WORKER_SERVICE])


_MAINS: dict[str, Callable[[], int]] = {
    "transfer": run_transfer,
    "scheduler": run_scheduler,
    "prefill": _run_prefill,
    "decode": _run_decode,
    "gateway": _run_gateway,
}
