"""A runner that swaps pages before it runs a step, around any runner."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weir.engine.plan import ModelRunner, StepPlan, StepResult, SwapPlan
from weir.kv.memory.swap import SwapFile


class PageBytes(Protocol):
    """The arena's pages, as bytes on the host."""

    def read(self, page_id: int) -> npt.NDArray[np.uint8]:
        """A page, [page_bytes]. Valid until the next call."""
        ...

    def fill(self, page_id: int, fill: Callable[[npt.NDArray[np.uint8]], bool]) -> bool:
        """Lets `fill` write a page, [page_bytes]. What it wrote counts only if it returns True, as this does then."""
        ...


class HostPages:
    """`pages` [num_pages, page_bytes] uint8, in place."""

    def __init__(self, pages: npt.NDArray[np.uint8]) -> None:
        self._pages = pages

    def read(self, page_id: int) -> npt.NDArray[np.uint8]:
        page: npt.NDArray[np.uint8] = self._pages[page_id]
        return page

    def fill(self, page_id: int, fill: Callable[[npt.NDArray[np.uint8]], bool]) -> bool:
        return fill(self._pages[page_id])


class PageMover:
    """Copies pages between the arena and a swap file."""

    def __init__(self, pages: PageBytes, swap_file: SwapFile) -> None:
        self._pages = pages
        self._swap_file = swap_file

    def move(self, plan: SwapPlan) -> frozenset[int]:
        """Does all copies of a step; the places where one failed."""
        failed = [
            copy.place
            for copy in plan.outs
            if not self._swap_file.try_store(copy.place, self._pages.read(copy.page_id))
        ]
        failed += [
            copy.place
            for copy in plan.ins
            if not self._pages.fill(copy.page_id, partial(self._swap_file.try_load, copy.place))
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
