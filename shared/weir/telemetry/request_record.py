"""What is remembered of one request: when it was where, and what each of its phases waited for.

    came        accepted        granted   started      first token    decode worker has it          ended
     │─ tokenize ──│─── queue ────│─ start ──│── prefill ──│── hand_off ──│──────── decode ──────────│

A request that is dispatched again goes through the phases from `queue` on again. All times are of its gateway's clock;
`shares` are what its workers, or its gateway, know of a part of a phase. No prompt, answer or key is in any of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from weir.core.life import Phase

PhaseName = Literal["tokenize", "queue", "start", "prefill", "hand_off", "decode"]
ShareName = Literal["waiting", "swapped_out", "paused", "moving"]

_STAGES: Mapping[Phase, PhaseName] = {
    Phase.RECEIVED: "queue",
    Phase.QUEUED: "queue",
    Phase.GRANTED: "start",
    Phase.PREFILLING: "prefill",
    Phase.HANDING_OFF: "hand_off",
    Phase.DECODING: "decode",
}
_PHASE_CAUSES: Mapping[PhaseName, str] = {
    "tokenize": "checking and tokenizing",
    "queue": "waiting for a grant",
    "start": "reaching its workers",
    "prefill": "computing the prompt",
    "hand_off": "passing its pages on",
    "decode": "computing tokens",
}
_SHARE_CAUSES: Mapping[ShareName, str] = {
    "waiting": "waiting for a place in a step",
    "swapped_out": "swapped out for others",
    "paused": "paused for more urgent ones",
    "moving": "moving to another worker",
}


@dataclass(frozen=True, slots=True)
class Mark:
    """The request entered a phase of its life. `worker_id`: who has it from then on, where one has."""

    phase: Phase
    at_s: float
    dispatch: int = 1
    worker_id: str = ""


@dataclass(frozen=True, slots=True)
class PhaseShare:
    """A part of a phase that was spent on one thing alone."""

    name: ShareName
    duration_ms: float


@dataclass(frozen=True, slots=True)
class RequestPhase:
    """One phase of one dispatch. `start_ms` counts from when the request came; `cause` says what most of it went to."""

    name: PhaseName
    start_ms: float
    duration_ms: float
    dispatch: int
    worker_id: str
    cause: str
    shares: tuple[PhaseShare, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """What happened beside the phases: interrupted, adopted, claimed."""

    name: str
    at_ms: float
    dispatch: int
    num_output_tokens: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """A request in a line of a list. Times in milliseconds; those of one that runs are as of now."""

    request_id: str
    client_id: str
    """What its client calls it; empty: it gave no name."""
    gateway_id: str
    trace_id: str
    """Empty: its trace was not sampled."""
    tenant: str
    lane: str
    model: str
    model_digest: str
    """Of the weights as its workers compute with them; empty: not known."""
    operation: str
    choice: int
    received_at_s: float
    """Unix time."""
    life: str
    """Its phase of life now: `weir.core.life.Phase`. The terminal ones are finished, cancelled, failed, refused."""
    duration_ms: float
    time_to_first_token_ms: float | None
    finish_reason: str
    error_type: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_dispatches: int
    num_moves: int
    """Times that another worker went on with its sequence."""
    num_preemptions: int
    longest_phase: str
    longest_phase_ms: float
    cause: str
    """Of its longest phase."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """All that is remembered of a request."""

    summary: RequestSummary
    max_tokens: int
    error: str
    placement_reason: str
    phases: tuple[RequestPhase, ...]
    events: tuple[RequestEvent, ...]


@dataclass(frozen=True, slots=True)
class RequestList:
    """Requests at one gateway. `num_held`: how many it remembers, whether or not they were asked for."""

    gateway_id: str
    num_held: int
    requests: tuple[RequestSummary, ...]


Shares = Mapping[tuple[int, PhaseName], Sequence[PhaseShare]]
"""By dispatch and phase."""


def phases_of(began_s: float, marks: Iterable[Mark], ended_s: float, shares: Shares) -> tuple[RequestPhase, ...]:
    """In order and without a gap, from `began_s` to `ended_s`; marks of one phase that follow each other are one."""
    spans: list[tuple[PhaseName, float, int, str]] = [("tokenize", began_s, 1, "")]
    for mark in marks:
        stage = _STAGES.get(mark.phase)
        if stage is None:
            continue  # a terminal one: `ended_s` says when
        if spans[-1][0] == stage and spans[-1][2] == mark.dispatch:
            continue
        spans.append((stage, mark.at_s, mark.dispatch, mark.worker_id))
    ends = [*(start_s for _, start_s, _, _ in spans[1:]), ended_s]
    return tuple(
        _phase(name, start_s - began_s, max(0.0, end_s - start_s), dispatch, worker_id, shares)
        for (name, start_s, dispatch, worker_id), end_s in zip(spans, ends, strict=True)
    )


def longest_of(phases: Sequence[RequestPhase]) -> RequestPhase:
    """The first of the longest."""
    return max(phases, key=lambda phase: phase.duration_ms)


def _phase(
    name: PhaseName, start_s: float, duration_s: float, dispatch: int, worker_id: str, shares: Shares
) -> RequestPhase:
    duration_ms = _milliseconds(duration_s)
    own = tuple(share for share in shares.get((dispatch, name), ()) if share.duration_ms > 0)
    return RequestPhase(
        name, _milliseconds(start_s), duration_ms, dispatch, worker_id, _cause(name, duration_ms, own), own
    )


def _cause(name: PhaseName, duration_ms: float, shares: Sequence[PhaseShare]) -> str:
    """The largest share, unless what no share explains is more."""
    plain = _PHASE_CAUSES[name]
    largest = max(shares, key=lambda share: share.duration_ms, default=None)
    if largest is None or largest.duration_ms <= duration_ms - sum(share.duration_ms for share in shares):
        return plain
    return _SHARE_CAUSES[largest.name]


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
