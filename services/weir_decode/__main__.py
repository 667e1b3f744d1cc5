"""`python -m weir_decode`: a decode worker."""

import os
import sys

from weir.runtime.config import load_config
from weir.runtime.service import ServiceContext, run_service
from weir.worker.assembly import build_worker
from weir.worker.requests.request_manager import RequestLimits
from weir.worker.requests.servicer import SERVICE_NAME
from weir.worker.shell import WorkerShell
from weir_decode.config import DecodeConfig
from weir_decode.role import DecodeRole

_MAX_LIVE = 4096  # hand-offs are bounded by the arena's slots, prompts by the scheduler, which reserves decode slots


async def _build(context: ServiceContext[DecodeConfig]) -> WorkerShell:
    limits = RequestLimits(max_live=_MAX_LIVE, takes_hand_offs=True)
    return await build_worker(context, limits, lambda parts: DecodeRole(parts, context.config, context.tracer))


def main() -> int:
    config = load_config(DecodeConfig, sys.argv[1:], environ=os.environ)
    return run_service("decode", config, _build, [SERVICE_NAME])


if __name__ == "__main__":
    sys.exit(main())
