"""Counts what Python executes: a measure of cost that no machine's speed and no other load changes."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def num_opcodes(work: Callable[[], object]) -> int:
    """Executed while `work` runs, in all Python code below it. Work inside C functions counts as the call alone.

    A collection of garbage would count callbacks and finalizers of whatever else is in the process: there is none.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count
