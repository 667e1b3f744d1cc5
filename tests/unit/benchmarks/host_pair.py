"""A pair whose device is the host: the hash model over shared memory. Spawned processes import this."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from weir.engine.plan import ModelRunner, StepPlan
from weir.kv.geometry import PAGE_TOKENS
from weir.kv.memory.device import DeviceMemory, HostMemory, receive_memory
from weir.testing.runner import HashRunner

VOCAB_SIZE = 1000


@dataclass(frozen=True)
class HostKind:
    """`dies_at_step`: the process of either worker ends without a word when it runs this step."""

    dies_at_step: int = 0
    page_bytes: int = 8 * PAGE_TOKENS
    vocab_size: int = VOCAB_SIZE

    def create_memory(self, num_bytes: int) -> DeviceMemory:
        return HostMemory.create(num_bytes)

    def receive_memory(self, connection: socket.socket) -> DeviceMemory:
        return receive_memory(connection, HostMemory.open)

    def make_runner(self, memory: DeviceMemory, num_pages: int) -> tuple[ModelRunner, Callable[[], None]]:
        assert isinstance(memory, HostMemory)
        pages = np.frombuffer(memory.buffer, np.int64, num_pages * PAGE_TOKENS).reshape(num_pages, PAGE_TOKENS)
        return HashRunner(num_pages, VOCAB_SIZE, self._on_run, pages), lambda: None

    def _on_run(self, plan: StepPlan) -> None:
        if plan.step == self.dies_at_step:
            os._exit(1)
