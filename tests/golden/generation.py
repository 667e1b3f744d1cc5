"""Drives a runner as a worker's engine would, with block tables over pages in memory; the golden set and its rule."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, ModelRunner, SampleSpec, StepPlan
from weir.kv.geometry import num_pages_for

GREEDY = SamplingParams(temperature=0.0)
ALLOWED_DIFFERENCES = 1
ALLOWED_MARGIN = 1e-3


@dataclass(frozen=True)
class Golden:
    """One prompt of the file."""

    name: str
    text: str
    prompt_ids: tuple[int, ...]
    expected_ids: tuple[int, ...]
    smallest_margin: float


def load_golden() -> list[Golden]:
    content = json.loads((Path(__file__).parent / "smollm2-135m.json").read_text())
    return [
        Golden(
            f"{number}: {prompt['origin']}",
            prompt["text"],
            tuple(prompt["prompt_ids"]),
            tuple(prompt["expected_ids"]),
            prompt["smallest_margin"],
        )
        for number, prompt in enumerate(content["prompts"])
    ]


class Continuation:
    """A prompt on its way through the runner. Its pages are scattered over the pool by `page_ids`."""

    def __init__(self, slot: int, prompt_ids: Sequence[int], page_ids: Sequence[int], num_new_tokens: int) -> None:
        self.output_ids: list[int] = []
        self._slot = slot
        self._prompt_ids = tuple(prompt_ids)
        self._page_ids = tuple(page_ids)
        self._num_new_tokens = num_new_tokens
        self._num_computed = 0

    @property
    def is_done(self) -> bool:
        return len(self.output_ids) == self._num_new_tokens

    def plan(self, chunk_tokens: int) -> ChunkPlan:
        known = [*self._prompt_ids, *self.output_ids]
        token_ids = tuple(known[self._num_computed : self._num_computed + chunk_tokens])
        is_last = self._num_computed + len(token_ids) == len(known)
        sample = SampleSpec(GREEDY, len(self.output_ids)) if is_last else None
        return ChunkPlan(self._slot, self._num_computed, token_ids, self._page_ids, sample)

    def record(self, chunk: ChunkPlan, sampled: Mapping[int, int]) -> None:
        self._num_computed = chunk.end
        if chunk.sample is not None:
            self.output_ids.append(sampled[self._slot])


def generate(
    runner: ModelRunner, prompts: Sequence[Golden], num_pool_pages: int, chunk_tokens: int, max_sequences: int
) -> list[list[int]]:
    """Greedy continuations as long as the expected ones; sequences join as pages and places become free."""
    free_pages = list(np.random.default_rng(7).permutation(num_pool_pages).tolist())
    waiting = list(enumerate(prompts))
    running: dict[int, Continuation] = {}
    held: dict[int, list[int]] = {}
    outputs: dict[int, list[int]] = {}
    step = 0
    while waiting or running:
        while waiting and len(running) < max_sequences and len(free_pages) >= num_pages_of(waiting[0][1]):
            slot, prompt = waiting.pop(0)
            held[slot] = [free_pages.pop() for _ in range(num_pages_of(prompt))]
            running[slot] = Continuation(slot, prompt.prompt_ids, held[slot], len(prompt.expected_ids))
        assert running, "the pool is smaller than the next prompt"
        chunks = tuple(sequence.plan(chunk_tokens) for sequence in running.values())
        sampled = runner.run(StepPlan(step, chunks)).token_ids
        step += 1
        for chunk in chunks:
            running[chunk.slot].record(chunk, sampled)
        for slot in [slot for slot, sequence in running.items() if sequence.is_done]:
            outputs[slot] = running.pop(slot).output_ids
            free_pages.extend(held.pop(slot))
    return [outputs[slot] for slot in range(len(prompts))]


def num_pages_of(prompt: Golden) -> int:
    return num_pages_for(len(prompt.prompt_ids) + len(prompt.expected_ids))


def poisoned_pages(num_pages: int, page_bytes: int) -> npt.NDArray[np.uint8]:
    """Every value is NaN: whatever reads a place that was never written shows."""
    return np.full((num_pages, page_bytes), 0xFF, dtype=np.uint8)
