"""`python -m weir_prefill`: a prefill worker."""

import os
import sys

from weir.kv.memory.device import ArenaMemory
from weir.runtime.config import load_config
from weir.runtime.service import ServiceContext, run_service
from weir.worker.assembly import ModelShape, RoleParts, build_worker
from weir.worker.engine.model_loading import ArenaRunner
from weir.worker.requests.request_manager import RequestLimits
from weir.worker.requests.servicer import SERVICE_NAME
from weir.worker.role import LoadedModel
from weir.worker.shell import WorkerShell
from weir_prefill.config import PrefillConfig
from weir_prefill.role import PrefillRole


async def _build(context: ServiceContext[PrefillConfig]) -> WorkerShell:
    config = context.config

    def make_role(parts: RoleParts, model: ModelShape) -> PrefillRole:
        return PrefillRole(parts, model.batch_limits(config, config.chunk_tokens), model.limits, context.tracer)

    limits = RequestLimits(max_live=config.max_num_seqs + config.max_num_waiting, takes_hand_offs=False)
    return await build_worker(context, limits, _over_arena, make_role)


def _over_arena(loaded: ArenaRunner, _: ArenaMemory) -> LoadedModel:
    return LoadedModel(loaded.runner, loaded.runner.warm_up)


def main() -> int:
    config = load_config(PrefillConfig, sys.argv[1:], environ=os.environ)
    return run_service("prefill", config, _build, [SERVICE_NAME])


if __name__ == "__main__":
    sys.exit(main())
