"""Static batches by wasted memory access, Magnus's batcher (Cheng et al., arXiv 2406.04785).

Of a batch with longest prompt L and longest predicted output G, request i (prompt p, output g) wastes

    padding    g * (L - p)                          tokens read that are no tokens of it
    waiting    sum of s + L for s = g .. G - 1      tokens read after it has ended

A batch's waste is the most that any of its requests wastes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from weir.policy.seams import BatchView, GateDecision, Member


@dataclass(frozen=True, slots=True)
class WmaLimits:
    """See `MagnusParams`."""

    max_waste: float
    max_batch: int
    max_hold_s: float


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Lengths of one request of a batch."""

    num_prompt_tokens: int
    num_output_tokens: float


def waste(shapes: Sequence[RequestLengths]) -> float:
    """Of a batch that is not empty."""
    longest_prompt = max(shape.num_prompt_tokens for shape in shapes)
    longest_output = max(shape.num_output_tokens for shape in shapes)
    return max(_waste_of(shape, longest_prompt, longest_output) for shape in shapes)


def _waste_of(shape: RequestLengths, longest_prompt: int, longest_output: float) -> float:
    output = shape.num_output_tokens
    padding = output * (longest_prompt - shape.num_prompt_tokens)
    num_steps = longest_output - output
    waiting = num_steps * longest_prompt + num_steps * (output + longest_output - 1) / 2
    return padding + waiting


class WmaGate:
    """Nobody joins a batch that runs. Of those that wait, each opens a batch or joins the one that it makes waste the
    least; the batch of the first of them starts, for the order has put it first."""

    def __init__(self, limits: WmaLimits) -> None:
        self._limits = limits
        self._next_deadline_s: float | None = None

    def decide(self, view: BatchView, now_s: float) -> GateDecision:
        self._next_deadline_s = None
        if view.running or not view.waiting or view.num_places <= 0:
            return GateDecision(())
        max_batch = min(self._limits.max_batch, view.num_places)
        batches = self._batches(view, max_batch)
        first = batches[0]
        held_until_s = min(member.waits_since_s for member in view.waiting) + self._limits.max_hold_s
        if len(view.waiting) < max_batch and now_s < held_until_s:
            self._next_deadline_s = held_until_s
            return GateDecision(())
        return GateDecision(first)

    @property
    def next_deadline_s(self) -> float | None:
        return self._next_deadline_s

    def _batches(self, view: BatchView, max_batch: int) -> list[list[int]]:
        """Indices of the waiting, batch by batch in the order in which they were opened."""
        shapes = [_shape(member) for member in view.waiting]
        batches: list[list[int]] = []
        for index, shape in enumerate(shapes):
            best: tuple[float, int] | None = None
            for number, batch in enumerate(batches):
                joined = [*(shapes[i] for i in batch), shape]
                if len(joined) > max_batch or _peak_tokens(joined) > view.num_pool_tokens:
                    continue
                wasted = waste(joined)
                if wasted < self._limits.max_waste and (best is None or (wasted, number) < best):
                    best = wasted, number
            if best is None:
                batches.append([index])
            else:
                batches[best[1]].append(index)
        return batches


def _shape(member: Member) -> RequestLengths:
    """Without a prediction: as long as its prompt."""
    predicted = member.predicted_output_tokens
    return RequestLengths(member.num_prompt_tokens, float(member.num_prompt_tokens) if predicted is None else predicted)


def _peak_tokens(shapes: Sequence[RequestLengths]) -> float:
    longest = max(s.num_prompt_tokens for s in shapes) + max(s.num_output_tokens for s in shapes)
    return len(shapes) * longest
