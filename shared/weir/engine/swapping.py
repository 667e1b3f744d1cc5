"""A runner that swaps pages before it runs a step, around any runner."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from weir.engine.plan import ModelRunner, StepPlan, StepResult, SwapPlan
from weir.kv.swap import SwapFile


class PageMover:
    """Copies pages between the arena, `pages` [num_pages, page_bytes] uint8, and a swap file."""

    def __init__(self, pages: npt.NDArray[np.uint8], swap_file: SwapFile) -> None:
        self._pages = pages
        self._swap_file = swap_file

    def move(self, plan: SwapPlan) -> frozenset[int]:
        """Does all copies of a step; the places where one failed."""
        failed = [
            copy.place for copy in plan.outs if not self._swap_file.try_store(copy.place, self._pages[copy.page_id])
        ]
        failed += [
            copy.place for copy in plan.ins if not self._swap_file.try_load(copy.place, self._pages[copy.page_id])
        ]
        return frozenset(failed)


class SwappingRunner:
    """Implements `weir.engine.plan.ModelRunner`."""

    def __init__(self, runner: ModelRunner, mover: PageMover) -> None:
        self._runner = runner
        self._mover = mover

    def run(self, plan: StepPlan) -> StepResult:
        if not plan.swap:
            return self._runner.run(plan)
        failed_places = self._mover.move(plan.swap)
        result = self._runner.run(plan) if plan.chunks else StepResult({})
        return replace(result, failed_places=failed_places)
