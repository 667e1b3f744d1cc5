"""The log-probabilities of a sequence's newest output tokens, in its record: the last MAX_KEPT, in a ring.

An adopter sends again the token or two that its predecessor sampled but may not have sent. Requests that ask for
log-probabilities would miss those of just these tokens.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weir.core.logprobs import TokenLogprobs
from weir.core.sampling import MAX_LOGPROBS

MAX_KEPT = 8
_EMPTY = -1
_ENTRY = np.dtype(
    [
        ("output_index", "<i4"),
        ("token_id", "<i4"),
        ("logprob", "<f4"),
        ("rank", "<i4"),
        ("num_top", "<i4"),
        ("top_ids", "<i4", (MAX_LOGPROBS,)),
        ("top_logprobs", "<f4", (MAX_LOGPROBS,)),
    ]
)
LOGPROBS_BYTES = MAX_KEPT * _ENTRY.itemsize


class LogprobRing:
    """Over the first LOGPROBS_BYTES of `memory`. An entry is that of the output token whose index it has."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def clear(self) -> None:
        self._entries()["output_index"] = _EMPTY

    def keep(self, output_index: int, logprobs: TokenLogprobs) -> None:
        """A death half way leaves the entry empty."""
        entry = self._entries()[output_index % MAX_KEPT]
        entry["output_index"] = _EMPTY
        num_top = len(logprobs.top)
        entry["token_id"], entry["logprob"], entry["rank"] = logprobs.token_id, logprobs.logprob, logprobs.rank
        entry["num_top"] = num_top
        entry["top_ids"][:num_top] = [token_id for token_id, _ in logprobs.top]
        entry["top_logprobs"][:num_top] = [logprob for _, logprob in logprobs.top]
        entry["output_index"] = output_index

    def read(self, output_token_ids: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """One for each token; those that are not in the ring are unknown."""
        found = {int(entry["output_index"]): entry for entry in self._entries().copy()}
        return tuple(
            _logprobs_of(found[index]) if index in found else TokenLogprobs.unknown(token_id)
            for index, token_id in enumerate(output_token_ids)
        )

    def _entries(self) -> NDArray[np.void]:
        # made anew each time: an array that lives on would keep the segment from being closed
        return np.frombuffer(self._memory, _ENTRY, MAX_KEPT)


def _logprobs_of(entry: np.void) -> TokenLogprobs:
    num_top = int(entry["num_top"])
    top = tuple(zip(entry["top_ids"][:num_top].tolist(), entry["top_logprobs"][:num_top].tolist(), strict=True))
    return TokenLogprobs(int(entry["token_id"]), float(entry["logprob"]), int(entry["rank"]), top)
