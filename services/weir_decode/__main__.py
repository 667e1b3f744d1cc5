"""`python -m weir_decode`: a decode worker."""

import os
import sys

from weir.engine.memory.swapping import PageMover, SwappingRunner
from weir.kv.arena.watermark import num_reservable_pages
from weir.kv.memory.kinds import ArenaMemory
from weir.kv.memory.swap import SwapFile, num_swap_places
from weir.runtime.config import load_config
from weir.runtime.service import ServiceContext, run_service
from weir.worker.assembly import ModelShape, RoleParts, build_worker
from weir.worker.engine.model_loading import ArenaRunner
from weir.worker.requests.request_manager import RequestLimits
from weir.worker.requests.servicer import SERVICE_NAME
from weir.worker.role import LoadedModel
from weir.worker.shell import WorkerShell
from weir_decode.config import DecodeConfig
from weir_decode.role import DecodeRole

_MAX_LIVE = 4096  # hand-offs are bounded by the arena's slots, prompts by the scheduler's booking of decode slots too


async def _build(context: ServiceContext[DecodeConfig]) -> WorkerShell:
    config = context.config

    def over_arena(loaded: ArenaRunner, arena: ArenaMemory) -> LoadedModel:
        geometry = arena.segment.geometry
        num_places = num_swap_places(config.swap_bytes, geometry)
        if num_places == 0:
            return LoadedModel(loaded.runner, loaded.runner.warm_up)
        swap_file = SwapFile(config.swap_dir, geometry.page_bytes, num_places)
        runner = SwappingRunner(loaded.runner, PageMover(loaded.pages, swap_file))
        return LoadedModel(runner, loaded.runner.warm_up)

    def make_role(parts: RoleParts, model: ModelShape) -> DecodeRole:
        return DecodeRole(
            parts,
            context.process_id,
            model.batch_limits(config, config.chunk_tokens),
            model.limits,
            context.tracer,
            lambda geometry: config.running_settings(
                num_swap_places(config.swap_bytes, geometry), num_reservable_pages(geometry.num_pages)
            ),
        )

    limits = RequestLimits(max_live=_MAX_LIVE, takes_hand_offs=True)
    return await build_worker(context, limits, over_arena, make_role, serves_locally=config.serves_locally)


def main() -> int:
    config = load_config(DecodeConfig, sys.argv[1:], environ=os.environ)
    return run_service("decode", config, _build, [SERVICE_NAME])


if __name__ == "__main__":
    sys.exit(main())
