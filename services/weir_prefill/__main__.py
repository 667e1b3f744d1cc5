"""`python -m weir_prefill`: a prefill worker."""

import asyncio
import os
import sys

from weir.kv.devices import ArenaMemory
from weir.runtime.config import load_config
from weir.runtime.service import ServiceContext, run_service
from weir.worker.assembly import RoleParts, assemble, facts_of, read_model_facts, surroundings_of
from weir.worker.desk import DeskLimits
from weir.worker.model_loading import begin_loading
from weir.worker.role import LoadedModel
from weir.worker.servicer import SERVICE_NAME
from weir.worker.shell import WorkerShell
from weir_prefill.config import PrefillConfig
from weir_prefill.role import PrefillRole


async def _build(context: ServiceContext[PrefillConfig]) -> WorkerShell:
    config = context.config
    over_arena = begin_loading(config)
    model = await asyncio.to_thread(read_model_facts, config)

    def load(arena: ArenaMemory) -> LoadedModel:
        runner = over_arena(arena).runner
        return LoadedModel(runner, runner.warm_up)

    def make_role(parts: RoleParts) -> PrefillRole:
        return PrefillRole(parts, model.batch_limits(config, config.chunk_tokens), model.limits, context.tracer)

    limits = DeskLimits(max_live=config.max_num_seqs + config.max_num_waiting, takes_hand_offs=False)
    return assemble(context, facts_of(context, model), limits, surroundings_of(context, model, load), make_role)


def main() -> int:
    config = load_config(PrefillConfig, sys.argv[1:], environ=os.environ)
    return run_service("prefill", config, _build, [SERVICE_NAME])


if __name__ == "__main__":
    sys.exit(main())
