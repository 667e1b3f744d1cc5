"""How much the lengths of earlier answers say of a conversation's next one.

Mooncake's trace (FAST 2025, Apache-2.0) has no text, but names each block of 512 prompt tokens by a hash of all up to
its end. So who continues whom can be read off it: a request whose prompt begins with all whole blocks of an earlier
one's, where the last of these was new with that one, and which has room for its answer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.predictors.agreement import Agreement, agreement
from benchmarks.predictors.probes import network_held_out
from weir.policy.predictors.features import Floats, answer_features
from weir.sim.workloads.traces import MOONCAKE_BLOCK_TOKENS
from weir.sim.workloads.workload import SimRequest
from weir.training.ranking import RankingSettings

_LEAST_BLOCKS = 2
"""The first block is the same in all requests of the trace."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TracedTurn:
    """One request: `conversation` is shared by all of its conversation, `earlier` the lengths of the answers before it,
    latest last; `num_new_tokens`: of its prompt, behind the last answer."""

    conversation: int
    num_new_tokens: int
    num_output_tokens: int
    earlier: tuple[int, ...]


def linked(requests: Iterable[SimRequest]) -> list[TracedTurn]:
    """One turn a request, in their order, which is that of arrival; `prefix_blocks` has all blocks of each prompt."""
    turns: list[TracedTurn] = []
    known: set[int] = set()
    ends: dict[int, tuple[SimRequest, int]] = {}  # last whole block -> the latest request that ended with it
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
        last = request.num_prompt_tokens // MOONCAKE_BLOCK_TOKENS - 1
        if last + 1 >= _LEAST_BLOCKS and (request.prefix_blocks[last] not in known or before is not None):
            ends[request.prefix_blocks[last]] = (request, number)
        known.update(request.prefix_blocks[: last + 1])
    return turns


def _continued(request: SimRequest, ends: dict[int, tuple[SimRequest, int]]) -> tuple[SimRequest, int] | None:
    """The latest turn that it continues: the one whose whole blocks are the longest beginning of its own."""
    for block in reversed(request.prefix_blocks):
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
