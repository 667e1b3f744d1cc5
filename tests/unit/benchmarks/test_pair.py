"""Prefill and decode in two processes over one memory that neither owns. The device is the host, the model a hash."""

import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from benchmarks.gpu.pair import PairFailed, PairLoad, run_pair
from weir.core.sampling import SamplingParams
from weir.engine.plan import ModelRunner, StepPlan
from weir.kv.geometry import PAGE_TOKENS
from weir.kv.memory.device import DeviceMemory, HostMemory, receive_memory
from weir.testing.runner import HashRunner, reference_tokens

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


def _prompts(count: int) -> tuple[tuple[int, ...], ...]:
    source = random.Random(7)
    return tuple(tuple(source.randrange(VOCAB_SIZE) for _ in range(source.randrange(1, 90))) for _ in range(count))


def test_the_tokens_are_those_of_one_process_and_every_page_comes_back() -> None:
    load = PairLoad(_prompts(12), num_output_tokens=20, num_pages=400, chunk_tokens=32)
    result = run_pair(HostKind(), load)
    greedy = SamplingParams(temperature=0.0)
    expected = {number: reference_tokens(prompt, greedy, 20, VOCAB_SIZE) for number, prompt in enumerate(load.prompts)}
    assert result.token_ids == {number: list(token_ids) for number, token_ids in expected.items()}
    assert len(result.hand_off_s) == len(load.prompts)
    assert result.num_free_pages_at_end == load.num_pages


def test_a_worker_that_dies_ends_the_run_and_is_named() -> None:
    load = PairLoad(_prompts(4), num_output_tokens=8, num_pages=200, timeout_s=20.0)
    with pytest.raises(PairFailed, match="the prefill worker has died"):
        run_pair(HostKind(dies_at_step=1), load)
