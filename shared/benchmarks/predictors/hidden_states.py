"""The built-in model's own hidden states, as features: of a prompt's last token, of its mean, and along an answer.

They are those of the int8 arithmetic that serves, which gives a row the same bits in whatever batch it is computed:
what is read off here is what a worker has in memory when it computes the same token.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.predictors.answers import Answer
from weir.engine.plan import ChunkPlan, StepPlan
from weir.kv.geometry import num_pages_for
from weir.model.cpu.core_share import FixedShare
from weir.model.cpu.forward import NUM_STAGES
from weir.model.cpu.packed_weights import PackedWeights, load_packed
from weir.model.cpu.runner import CpuDecoder, page_numbers
from weir.model.cpu.slices import StepSlice, cut_slices
from weir.model.cpu.workspace import MAX_SLICE_ROWS, BrainFloats
from weir.model.files.catalog import model_cache_dir
from weir.model.files.config import load_model_config
from weir.model.files.digest import model_digest
from weir.model.files.source import ModelSource
from weir.model.precision import page_geometry
from weir.model.rows import ordered_chunks
from weir.policy.predictors.features import Floats

LAYERS = (8, 15, 22, 30)
"""Of 30: after how many of them the residual stream is read. After the last one it is normed, as the head sees it."""
AGES = (0, 32, 64, 128)
"""Tokens of an answer that are known."""


@dataclass(frozen=True)
class PromptStates:
    """`last` [ages, layers, hidden]: of the last token known at each age that the answer reached; `mean` [layers,
    hidden]: over the prompt's tokens behind the template's own beginning."""

    last: Floats
    mean: Floats


class TappedDecoder(CpuDecoder):
    """The decoder that serves, one layer a call, with the residual stream read in between."""

    def states_of(self, step_slice: StepSlice, pages: BrainFloats, layers: Sequence[int]) -> Floats:
        """[layers, rows, hidden] after so many layers each, and no more of them than that. Writes keys and values as
        `compute` does."""
        arrays = step_slice.arrays
        extent = self._workspace.plan_attention(arrays)
        found: list[Floats] = []
        for layer in range(max(layers)):
            self._call(arrays, pages, extent._replace(first_layer=layer, last_layer=layer + 1, last_stage=NUM_STAGES))
            if layer + 1 in layers:
                found.append(self._workspace.buffers.hidden[: step_slice.num_rows].copy())
        if self._config.num_layers in layers:
            found[-1] = self._normed(found[-1])
        return np.stack(found)

    def _normed(self, rows: Floats) -> Floats:
        power = np.square(rows).mean(axis=1, keepdims=True) + np.float32(self._config.rms_norm_eps)
        normed: Floats = rows / np.sqrt(power) * self._model.norms[-1]
        return normed


class StateReader:
    """Reads states of one sequence after the other, over pages of its own."""

    def __init__(self, source: ModelSource, layers: Sequence[int], most_tokens: int, cache_dir: Path | None = None):
        """Raises ModelError, ValueError for a layer that the model lacks."""
        self._config = load_model_config(source)
        if not layers or list(layers) != sorted({*layers}) or layers[0] < 1 or layers[-1] > self._config.num_layers:
            raise ValueError(f"layers {list(layers)}: must rise from 1 to {self._config.num_layers} at most")
        packed: PackedWeights = load_packed(
            source, self._config, model_digest(source, "int8"), cache_dir or model_cache_dir()
        )
        self._layers = tuple(layers)
        self._decoder = TappedDecoder(self._config, packed, FixedShare(1))
        page_bytes = page_geometry(self._config, "int8").page_bytes
        self._most_tokens = most_tokens
        self._num_pages = num_pages_for(most_tokens)
        self._pages = page_numbers(self._config, np.zeros((self._num_pages, page_bytes), np.uint8))

    def rows_of(self, token_ids: Sequence[int]) -> Floats:
        """[layers, tokens, hidden] of one sequence. Raises ValueError for one that is too long."""
        if len(token_ids) > self._most_tokens:
            raise ValueError(f"a sequence of {len(token_ids)} tokens: states are read of {self._most_tokens} at most")
        config, table = self._config, tuple(range(self._num_pages))
        plan = StepPlan(0, (ChunkPlan(0, 0, tuple(token_ids), table, None),))
        chunks = ordered_chunks(plan, self._num_pages, config.vocab_size, config.max_context_tokens)
        slices = cut_slices(*chunks, MAX_SLICE_ROWS)
        return np.concatenate([self._decoder.states_of(one, self._pages, self._layers) for one in slices], axis=1)

    def states(self, prompt: Sequence[int], answer: Sequence[int], ages: Sequence[int], first: int) -> PromptStates:
        """At the ages that leave at least one token of the answer to come, and at age 0. `first`: where the prompt's
        own tokens begin."""
        reached = [age for age in ages if age == 0 or age < len(answer)]
        rows = self.rows_of([*prompt, *answer[: reached[-1]]])
        last = np.stack([rows[:, len(prompt) + age - 1] for age in reached])
        return PromptStates(last, rows[:, first : len(prompt)].mean(axis=1))


@dataclass(frozen=True)
class StateTable:
    """Of all answers of one data set that were looked at, in order. `last` [answers, ages, layers, hidden] is NaN at
    ages that an answer did not reach; `mean` [answers, layers, hidden]; `index`, `seed`, `num_output_tokens` int64."""

    last: Floats
    mean: Floats
    index: npt.NDArray[np.int64]
    seed: npt.NDArray[np.int64]
    num_output_tokens: npt.NDArray[np.int64]

    @property
    def has_answers(self) -> bool:
        """Whether states were read along answers, and not of prompts alone."""
        return bool(np.isfinite(self.last[:, 1:]).any())

    def save(self, path: Path) -> None:
        """Raises OSError."""
        np.savez(
            path,
            last=self.last,
            mean=self.mean,
            index=self.index,
            seed=self.seed,
            num_output_tokens=self.num_output_tokens,
        )

    @classmethod
    def load(cls, path: Path) -> "StateTable":
        """Raises OSError, KeyError."""
        with np.load(path) as arrays:
            names = ("last", "mean", "index", "seed", "num_output_tokens")
            return cls(*(arrays[name] for name in names))


def read_states(
    reader: StateReader,
    prompts: Sequence[Sequence[int]],
    answers: Iterable[Answer],
    first: int,
    on_read: Callable[[], None] = lambda: None,
) -> StateTable:
    """Of answers with their tokens; `prompts` by index."""
    last: list[Floats] = []
    mean: list[Floats] = []
    kept: list[Answer] = []
    for answer in answers:
        states = reader.states(prompts[answer.index], answer.token_ids, AGES, first)
        padding = np.full((len(AGES) - len(states.last), *states.last.shape[1:]), np.nan, np.float32)
        last.append(np.concatenate([states.last, padding]))
        mean.append(states.mean)
        kept.append(answer)
        on_read()
    numbers = np.array([(a.index, a.seed, a.num_output_tokens) for a in kept], np.int64).reshape(-1, 3)
    return StateTable(np.stack(last), np.stack(mean), numbers[:, 0], numbers[:, 1], numbers[:, 2])


def write_token_ids(path: Path, answer: Answer) -> None:
    """Adds a line. Raises OSError."""
    line = {
        "data_set": answer.data_set,
        "index": answer.index,
        "seed": answer.seed,
        "num_prompt_tokens": answer.num_prompt_tokens,
        "is_cut": answer.is_cut,
        "token_ids": answer.token_ids,
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, separators=(",", ":")) + "\n")


def read_token_ids(path: Path) -> list[Answer]:
    """By data set, seed and index. Raises OSError, ValueError, KeyError."""
    answers = []
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        ids = tuple(entry["token_ids"])
        numbers = (entry["index"], entry["seed"], entry["num_prompt_tokens"], len(ids))
        answers.append(Answer(entry["data_set"], *numbers, entry["is_cut"], ids))
    return sorted(answers, key=lambda answer: (answer.data_set, answer.seed, answer.index))
