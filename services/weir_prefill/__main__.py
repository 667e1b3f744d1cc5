"""`python -m weir_prefill`: a prefill worker."""

import os
import sys

from weir.runtime.config import load_config
from weir.runtime.service import ServiceContext, run_service
from weir.worker.assembly import build_worker
from weir.worker.requests.request_manager import RequestLimits
from weir.worker.requests.servicer import SERVICE_NAME
from weir.worker.shell import WorkerShell
from weir_prefill.config import PrefillConfig
from weir_prefill.role import PrefillRole


async def _build(context: ServiceContext[PrefillConfig]) -> WorkerShell:
    config = context.config
    limits = RequestLimits(max_live=config.max_num_seqs + config.max_num_waiting, takes_hand_offs=False)
    return await build_worker(context, limits, lambda parts: PrefillRole(parts, context.tracer))


def main() -> int:
    config = load_config(PrefillConfig, sys.argv[1:], environ=os.environ)
    return run_service("prefill", config, _build, [SERVICE_NAME])


if __name__ == "__main__":
    sys.exit(main())
