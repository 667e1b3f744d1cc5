"""Static batches by wasted memory access, Magnus's batcher (Cheng et al., arXiv 2406.04785).

Of a batch with longest prompt L and longest predicted output G, request i (prompt p, output g) wastes

    padding    g * (L - p)                          tokens of padding that its steps attend to
    waiting    sum of s + L for s = g .. G - 1      tokens attended to after it has ended

A batch's waste is the most that any of its requests wastes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from weir.policy.seams import BatchView, GateDecision, Member


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Lengths of one request of a batch."""

    num_prompt_tokens: int
    num_output_tokens: float


def waste(requests: Sequence[RequestLengths]) -> float:
    """Tokens that a batch, which must not be empty, wastes."""
    longest_prompt = max(request.num_prompt_tokens for request in requests)
    longest_output = max(request.num_output_tokens for request in requests)
    return max(_waste_of(request, longest_prompt, longest_output) for request in requests)


def _waste_of(request: RequestLengths, longest_prompt: int, longest_output: float) -> float:
    output = request.num_output_tokens
    padding = output * (longest_prompt - request.num_prompt_tokens)
    num_steps = longest_output - output
    waiting = num_steps * longest_prompt + num_steps * (output + longest_output - 1) / 2
    return padding + waiting


class WmaGate:
    """Nobody joins a batch that runs. Of those that wait, each opens a batch or joins the one that it makes waste the
    least; the batch of the first of them starts, for the order has put it first."""

    def __init__(self, max_waste: float, max_batch: int, max_hold_s: float) -> None:
        """As `MagnusParams` has them."""
        self._max_waste = max_waste
        self._max_batch = max_batch
        self._max_hold_s = max_hold_s
        self._next_deadline_s: float | None = None

    def decide(self, view: BatchView, now_s: float) -> GateDecision:
        self._next_deadline_s = None
        if view.running or not view.waiting or view.max_running <= 0:
            return GateDecision(())
        max_batch = min(self._max_batch, view.max_running)
        batches = self._batches(view, max_batch)
        first = batches[0]
        held_until_s = min(member.waits_since_s for member in view.waiting) + self._max_hold_s
        if len(view.waiting) < max_batch and now_s < held_until_s:
            self._next_deadline_s = held_until_s
            return GateDecision(())
        return GateDecision(first)

    @property
    def next_deadline_s(self) -> float | None:
        return self._next_deadline_s

    def _batches(self, view: BatchView, max_batch: int) -> list[list[int]]:
        """Indices of the waiting, batch by batch in the order in which they were opened."""
        requests = [_lengths_of(member) for member in view.waiting]
        batches: list[list[int]] = []
        for index, request in enumerate(requests):
            best: tuple[float, int] | None = None
            for number, batch in enumerate(batches):
                joined = [*(requests[i] for i in batch), request]
                if len(joined) > max_batch or _peak_tokens(joined) > view.num_pool_tokens:
                    continue
                wasted = waste(joined)
                if wasted < self._max_waste and (best is None or (wasted, number) < best):
                    best = wasted, number
            if best is None:
                batches.append([index])
            else:
                batches[best[1]].append(index)
        return batches


def _lengths_of(member: Member) -> RequestLengths:
    """Without a prediction: as long as its prompt."""
    predicted = member.predicted_output_tokens
    return RequestLengths(member.num_prompt_tokens, float(member.num_prompt_tokens) if predicted is None else predicted)


def _peak_tokens(requests: Sequence[RequestLengths]) -> float:
    longest = max(s.num_prompt_tokens for s in requests) + max(s.num_output_tokens for s in requests)
    return len(requests) * longest
