"""`python -m weir_scheduler`: one scheduler process."""

import os
import sys

from weir.bus.nats import NatsBus
from weir.bus.protocol import Bus
from weir.core.clock import SystemClock
from weir.runtime.config import load_config
from weir.runtime.service import ServiceContext, run_service
from weir_scheduler.component import SchedulerComponent
from weir_scheduler.config import SchedulerConfig

_CONNECT_TIMEOUT_S = 30.0


async def build(context: ServiceContext[SchedulerConfig]) -> SchedulerComponent:
    config = context.config

    async def connect() -> Bus:
        return await NatsBus.connect(config.nats_url, name=context.process_id, timeout_s=_CONNECT_TIMEOUT_S)

    return SchedulerComponent(
        connect,
        config.instance,
        context.process_id,
        config.limits,
        limits_file=config.limits_file,
        policy=config.policy,
        tracer=context.tracer,
        clock=SystemClock(),
        request_shutdown=context.request_shutdown,
    )


def main() -> int:
    """Returns the exit code."""
    config = load_config(SchedulerConfig, sys.argv[1:], environ=os.environ)
    return run_service("scheduler", config, build, service_names=())


if __name__ == "__main__":
    sys.exit(main())
