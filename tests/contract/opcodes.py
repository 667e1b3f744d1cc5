"""Counts what Python executes: a measure of cost that no machine's speed and no other load changes."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def num_opcodes(work: Callable[[], object]) -> int:
    """Executed while `work` runs, in all Python code below it. Work inside C functions counts as the call alone."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
