"""`python -m weir_scheduler`: one scheduler process."""

import os
import sys

from weir.bus.nats import NatsBus
from weir.bus.protocol import Bus
from weir.bus.subjects import Subjects
from weir.core.clock import SystemClock
from weir.rpc.access import Callers
from weir.runtime.config import load_config
from weir.runtime.process_tuning import short_collections
from weir.runtime.service import ServiceContext, run_service
from weir.wire.v1 import scheduling_pb2, scheduling_pb2_grpc
from weir_scheduler.component import SchedulerComponent, SchedulerSettings
from weir_scheduler.config import SchedulerConfig
from weir_scheduler.operator_calls import OperatorGate, SchedulingServicer, WorkerOperations

_CONNECT_TIMEOUT_S = 30.0
_SERVICE_NAME = scheduling_pb2.DESCRIPTOR.services_by_name["Scheduling"].full_name


async def build(context: ServiceContext[SchedulerConfig]) -> SchedulerComponent:
    config = context.config

    async def connect() -> Bus:
        return await NatsBus.connect(
            config.nats_url,
            name=context.process_id,
            timeout_s=_CONNECT_TIMEOUT_S,
            seed_file=config.nats_seed_file,
            inbox=Subjects(config.instance).inbox("scheduler"),
            ca_file=config.nats_ca_file,
            num_replicas=config.nats_replicas,
        )

    settings = SchedulerSettings(
        config.instance, config.limits, config.limits_file, config.admin_key_file, config.policy, context.address
    )
    component = SchedulerComponent(
        connect,
        context.process_id,
        settings,
        tracer=context.tracer,
        clock=SystemClock(),
        request_shutdown=context.request_shutdown,
        changes=context.changes,
    )
    gate = OperatorGate(component.leader_admins, component.changes)
    context.access.answer(Callers.OPERATOR, gate.check)
    scheduling_pb2_grpc.add_SchedulingServicer_to_server(SchedulingServicer(gate), context.grpc_server)
    context.admin.answer_operators(WorkerOperations(gate))
    return component


def main() -> int:
    """Returns the exit code."""
    config = load_config(SchedulerConfig, sys.argv[1:], environ=os.environ)
    with short_collections():
        return run_service("scheduler", config, build, service_names=(_SERVICE_NAME,))


if __name__ == "__main__":
    sys.exit(main())
