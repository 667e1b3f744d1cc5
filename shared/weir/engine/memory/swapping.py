"""Copies pages between the arena and the swap file, before the step of any runner."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weir.engine.plan import LaunchingRunner, ModelRunner, StepPlan, StepResult, SwapPlan
from weir.kv.memory.swap import SwapFile


class PageBytes(Protocol):
    """The arena's pages, as bytes on the host."""

    def read(self, page_id: int) -> npt.NDArray[np.uint8]:
        """A page, [page_bytes]. Valid until the next call."""
        ...

    def fill(self, page_id: int, fill: Callable[[npt.NDArray[np.uint8]], bool]) -> bool:
        """Lets `fill` change a page, [page_bytes]. The changes count only if it returns True, as this does then."""
        ...


class HostPages:
    """Pages in host memory: `pages` is [num_pages, page_bytes] uint8, changed in place."""

    def __init__(self, pages: npt.NDArray[np.uint8]) -> None:
        self._pages = pages

    def read(self, page_id: int) -> npt.NDArray[np.uint8]:
        page: npt.NDArray[np.uint8] = self._pages[page_id]
        return page

    def fill(self, page_id: int, fill: Callable[[npt.NDArray[np.uint8]], bool]) -> bool:
        return fill(self._pages[page_id])


class PageSwapper:
    """Belongs to the thread that runs steps."""

    def __init__(self, pages: PageBytes, swap_file: SwapFile) -> None:
        self._pages = pages
        self._swap_file = swap_file

    def swap(self, plan: SwapPlan) -> frozenset[int]:
        """Makes all copies of a step. Returns the slots of the swap file for which one failed."""
        failed = [
            copy.swap_slot
            for copy in plan.outs
            if not self._swap_file.try_store(copy.swap_slot, self._pages.read(copy.page_id))
        ]
        failed += [
            copy.swap_slot
            for copy in plan.ins
            if not self._pages.fill(copy.page_id, partial(self._swap_file.try_load, copy.swap_slot))
        ]
        return frozenset(failed)


def swapping_runner(runner: ModelRunner, swapper: PageSwapper) -> ModelRunner:
    """Makes the copies of a step's plan before `runner` runs it. Launches steps if that one does."""
    if isinstance(runner, LaunchingRunner):
        return _LaunchingSwappingRunner(runner, swapper)
    return _SwappingRunner(runner, swapper)


class _SwappingRunner:
    def __init__(self, runner: ModelRunner, swapper: PageSwapper) -> None:
        self._runner = runner
        self._swapper = swapper

    def run(self, plan: StepPlan) -> StepResult:
        if not plan.swap:
            return self._runner.run(plan)
        failed_swap_slots = self._swapper.swap(plan.swap)
        result = self._runner.run(plan) if plan.chunks else StepResult({})
        return replace(result, failed_swap_slots=failed_swap_slots)


class _LaunchingSwappingRunner(_SwappingRunner):
    def __init__(self, runner: LaunchingRunner, swapper: PageSwapper) -> None:
        super().__init__(runner, swapper)
        self._launch = runner.launch

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """A step with copies runs alone: none is planned ahead of it, and it is not planned ahead."""
        return partial(self.run, plan) if plan.swap else self._launch(plan)
