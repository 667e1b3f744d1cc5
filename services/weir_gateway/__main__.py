"""`python -m weir_gateway`: one gateway process."""

import os
import sys
from functools import partial

from weir.bus.nats import NatsBus
from weir.bus.subjects import Subjects
from weir.rpc.access import Callers
from weir.rpc.body_budget import BodyBudget
from weir.rpc.port_guard import PortGuard, PortLimits
from weir.runtime.config import load_config
from weir.runtime.extras import check_extra
from weir.runtime.service import ServiceContext, run_service
from weir.wire.v1 import inference_pb2, inference_pb2_grpc
from weir_gateway.config import GatewayConfig
from weir_gateway.frontends.grpc_frontend import InferenceServicer
from weir_gateway.gateway import GatewayComponent, GatewayLoaders, GatewayProcess
from weir_gateway.output_lengths import load_lengths
from weir_gateway.requests.model_follower import ModelFollower
from weir_gateway.settings import GatewaySettings

_CONNECT_TIMEOUT_S = 30.0
_SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


async def build(context: ServiceContext[GatewayConfig], bodies: BodyBudget) -> GatewayComponent:
    config = context.config
    if config.batch_url and not config.batch_url.startswith("sqlite:"):
        check_extra("postgres", "batch_store on PostgreSQL")
    models = ModelFollower(config)
    loaders = GatewayLoaders(
        partial(
            NatsBus.connect,
            config.nats_url,
            name=context.process_id,
            timeout_s=_CONNECT_TIMEOUT_S,
            seed_file=config.nats_seed_file,
            inbox=Subjects(config.instance).inbox("gateway"),
            ca_file=config.nats_ca_file,
        ),
        models.load,
        partial(load_lengths, config),
        models.follow if config.models_file else None,
    )
    process = GatewayProcess(
        context.process_id,
        context.tracer,
        bodies,
        context.request_shutdown,
        context.admin.figures,
        dialer=context.dialer,
        http_tls=None if context.tls is None else context.tls.http_context,
    )
    component = GatewayComponent(process, GatewaySettings.of(config), loaders)
    servicer = InferenceServicer(lambda: component.gateway.processor, send_timeout_s=config.send_timeout_s)
    context.access.answer(Callers.TENANT, servicer.identify)
    context.access.answer(Callers.OPERATOR, servicer.check_operator)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, context.grpc_server)
    return component


def main() -> int:
    """Returns the exit code."""
    config = load_config(GatewayConfig, sys.argv[1:], environ=os.environ)
    bodies = BodyBudget(config.max_bodies_bytes, sure_bytes=config.message_bytes)
    guard = PortGuard(
        PortLimits(config.message_bytes, config.max_calls, max_connections=config.max_connections), bodies
    )
    return run_service("gateway", config, partial(build, bodies=bodies), service_names=(_SERVICE_NAME,), gate=guard)


if __name__ == "__main__":
    sys.exit(main())
