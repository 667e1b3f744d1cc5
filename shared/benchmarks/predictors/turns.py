"""How much the lengths of earlier answers say of a conversation's next one.

Mooncake's trace (FAST 2025, Apache-2.0) has no text, but names each block of 512 prompt tokens by a hash of all up to
its end. So who continues whom can be read off it: a request whose prompt begins with all whole blocks of an earlier
one's, where the last of these was new with that one, and which has room for its answer.
"""

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.predictors.agreement import Agreement, agreement
from benchmarks.predictors.probes import network_held_out
from weir.policy.predictors.features import Floats, answer_features
from weir.training.ranking import RankingSettings

BLOCK_TOKENS = 512
_LEAST_BLOCKS = 2
"""The first block is the same in all requests of the trace."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """`block_hashes`: of the prompt's blocks, the last one may be partly filled."""

    num_prompt_tokens: int
    num_output_tokens: int
    block_hashes: tuple[int, ...]

    @property
    def num_whole_blocks(self) -> int:
        return self.num_prompt_tokens // BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class TracedTurn:
    """One request: `conversation` is shared by all of its conversation, `earlier` the lengths of the answers before it,
    latest last; `num_new_tokens`: of its prompt, behind the last answer."""

    conversation: int
    num_new_tokens: int
    num_output_tokens: int
    earlier: tuple[int, ...]


def read_mooncake(path: Path) -> list[TracedRequest]:
    """In order of arrival. Raises OSError, KeyError, ValueError."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [TracedRequest(row["input_length"], row["output_length"], tuple(row["hash_ids"])) for row in rows]


def linked(requests: Iterable[TracedRequest]) -> list[TracedTurn]:
    """One turn a request, in their order."""
    turns: list[TracedTurn] = []
    known: set[int] = set()
    ends: dict[int, tuple[TracedRequest, int]] = {}  # last whole block -> the latest request that ended with it
    for number, request in enumerate(requests):
        before = _continued(request, ends)
        if before is None:
            turns.append(TracedTurn(number, request.num_prompt_tokens, request.num_output_tokens, ()))
        else:
            earlier, place = before
            turn = turns[place]
            num_known = earlier.num_prompt_tokens + earlier.num_output_tokens
            answers = (*turn.earlier, earlier.num_output_tokens)
            num_new = request.num_prompt_tokens - num_known
            turns.append(TracedTurn(turn.conversation, num_new, request.num_output_tokens, answers))
        last = request.num_whole_blocks - 1
        if last + 1 >= _LEAST_BLOCKS and (request.block_hashes[last] not in known or before is not None):
            ends[request.block_hashes[last]] = (request, number)
        known.update(request.block_hashes[: last + 1])
    return turns


def _continued(request: TracedRequest, ends: dict[int, tuple[TracedRequest, int]]) -> tuple[TracedRequest, int] | None:
    """The latest turn that it continues: the one whose whole blocks are the longest beginning of its own."""
    for block in reversed(request.block_hashes):
        found = ends.get(block)
        if found is not None and request.num_prompt_tokens >= found[0].num_prompt_tokens + found[0].num_output_tokens:
            return found
    return None


@dataclass(frozen=True)
class TurnsResult:
    """Kendall's tau with the lengths of later turns' answers, and `gain`, of `network` over `without`.

    `network`: ListMLE on prompt lengths and the features that predictors have of earlier answers; `without`: on prompt
    lengths alone. Both are trained on all requests of other conversations, and looked at in later turns only.
    """

    num_requests: int
    num_later: int
    new_tokens: Agreement
    last_answer: Agreement
    mean_answer: Agreement
    without: Agreement
    network: Agreement

    @property
    def gain(self) -> Agreement:
        return self.network.minus(self.without)


def measure_turns(turns: Sequence[TracedTurn], seed: int = 0, settings: RankingSettings | None = None) -> TurnsResult:
    """Raises ValueError if no request continues another."""
    later = np.array([bool(turn.earlier) for turn in turns])
    if not later.any():
        raise ValueError("no request continues another: nothing to measure")
    lengths = np.array([turn.num_output_tokens for turn in turns], np.int64)
    groups = np.array([turn.conversation for turn in turns], np.int64)
    features = turn_features(turns)

    def of(scores: npt.NDArray[np.generic]) -> Agreement:
        return agreement(scores[later], lengths[later], groups[later])

    def held_out(columns: slice) -> Agreement:
        chosen = settings or RankingSettings()
        return of(network_held_out(lambda fold: features[:, columns], lengths, groups, seed, 5, chosen))

    return TurnsResult(
        num_requests=len(turns),
        num_later=int(later.sum()),
        new_tokens=of(features[:, 0]),
        last_answer=of(features[:, 2]),
        mean_answer=of(features[:, 3]),
        without=held_out(slice(0, 1)),
        network=held_out(slice(0, None)),
    )


def turn_features(turns: Sequence[TracedTurn]) -> Floats:
    """[turns, 4]: log1p of the prompt's new tokens, then what `weir.policy.predictors.features` has of the answers."""
    rows = [(np.log1p(max(0, turn.num_new_tokens)), *answer_features(turn.earlier)) for turn in turns]
    return np.array(rows, np.float32)
