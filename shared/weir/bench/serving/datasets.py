"""What `weir bench serve` sends: lengths, prompts, and, of traces, times. The same for the same seed."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weir.bench.serving.jobs import as_text, random_prompt, random_prompts
from weir.bench.serving.records import BenchRequest, FollowUp
from weir.sim.workloads.traces import detect_format, read_trace
from weir.sim.workloads.workload import SimRequest, Workload

TRACE_FORMATS = ("azure", "mooncake", "aibrix", "arena", "capture")
ANY_TRACE = "trace"


class Dataset(Protocol):
    """A source of requests."""

    @property
    def has_times(self) -> bool:
        """Whether its requests say when they come."""

    @property
    def is_of_chats(self) -> bool:
        """Whether its requests are conversations, which completions cannot hold."""

    def requests(self, num: int, seed: int) -> list[BenchRequest]:
        """`num` answers in all, fewer where it has no more. Raises ValueError."""


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """Lengths even between 1 - `range_ratio` and 1 + `range_ratio` of those named, behind a prefix that all share."""

    input_len: int = 128
    output_len: int = 64
    range_ratio: float = 0.0
    prefix_len: int = 0
    has_times = False
    is_of_chats = False

    def __post_init__(self) -> None:
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"random-range-ratio {self.range_ratio}: must be at least 0 and below 1")

    def requests(self, num: int, seed: int) -> list[BenchRequest]:
        if self.range_ratio == 0 and self.prefix_len == 0:
            return [BenchRequest(prompt, self.output_len) for prompt in random_prompts(num, self.input_len, seed)]
        source = random.Random(seed)
        prefix = random_prompt(self.prefix_len, source)
        return [
            BenchRequest([*prefix, *random_prompt(self._drawn(self.input_len, source), source)], output_len)
            for output_len in [self._drawn(self.output_len, source) for _ in range(num)]
        ]

    def _drawn(self, length: int, source: random.Random) -> int:
        low, high = (1 - self.range_ratio) * length, (1 + self.range_ratio) * length
        return source.randint(max(1, math.ceil(low)), max(1, math.floor(high)))


@dataclass(frozen=True, slots=True)
class PrefixRepetition:
    """`num_prefixes` prefixes, each before as many suffixes of its own, in a drawn order."""

    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    output_len: int = 128
    has_times = False
    is_of_chats = False

    def requests(self, num: int, seed: int) -> list[BenchRequest]:
        if num < self.num_prefixes:
            raise ValueError(
                f"prefix-repetition-num-prefixes {self.num_prefixes}: must not be above the {num} of num-prompts"
            )
        source = random.Random(seed)
        prefixes = [random_prompt(self.prefix_len, source) for _ in range(self.num_prefixes)]
        order = [index % self.num_prefixes for index in range(num)]
        source.shuffle(order)
        return [
            BenchRequest([*prefixes[which], *random_prompt(self.suffix_len, source)], self.output_len)
            for which in order
        ]


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Chats of `num_turns`: each turn holds all before it, and comes `pause_s` (on average) after the last answer.

    Chats begin at the times of arrivals. All share a system prompt, unless its length is 0.
    """

    num_turns: int = 4
    system_len: int = 64
    user_len: int = 64
    output_len: int = 64
    pause_s: float = 0.0
    has_times = False
    is_of_chats = True

    def requests(self, num: int, seed: int) -> list[BenchRequest]:
        source = random.Random(seed)
        system = as_text(random_prompt(self.system_len, source))
        chats, left = [], num
        while left > 0:
            texts = [as_text(random_prompt(self.user_len, source)) for _ in range(min(left, self.num_turns))]
            pauses_s = [source.expovariate(1 / self.pause_s) if self.pause_s else 0.0 for _ in texts]
            turns = [FollowUp(text, self.output_len, at) for text, at in zip(texts[1:], pauses_s[1:], strict=True)]
            chats.append(BenchRequest(texts[0], self.output_len, system=system, follow_ups=tuple(turns)))
            left -= len(texts)
        return chats


@dataclass(frozen=True, slots=True)
class TraceReplay:
    """How a trace is replayed: times are multiplied by `time_scale`, lengths divided by the other two.

    `trace_format`: one of the known, or any. Without `is_self_timed` its lengths come at other times.
    """

    path: Path
    time_scale: float = 1.0
    prompt_scale: float = 1.0
    output_scale: float = 1.0
    trace_format: str = ANY_TRACE
    is_self_timed: bool = True
    is_of_chats = False

    @property
    def has_times(self) -> bool:
        return self.is_self_timed

    def requests(self, num: int, seed: int) -> list[BenchRequest]:
        """The first `num` of the file. Raises `weir.sim.workloads.trace_file.TraceError`.

        Where the trace says what requests share, their prompts begin alike.
        """
        if self.trace_format != ANY_TRACE and (found := detect_format(self.path)) != self.trace_format:
            raise ValueError(f"dataset-name {self.trace_format}: {self.path} is of the form {found}")
        workload = read_trace(self.path, seed=seed)
        return [_traced(workload, request, self, seed + index) for index, request in enumerate(workload.requests[:num])]


def _traced(workload: Workload, request: SimRequest, replay: TraceReplay, seed: int) -> BenchRequest:
    length = max(1, round(request.num_prompt_tokens / replay.prompt_scale))
    body: dict[str, object] = {}
    for name, seconds in (
        ("ttft_target_ms", request.ttft_target_s),
        ("itl_target_ms", request.itl_target_s),
        ("deadline_ms", request.deadline_s),
    ):
        if seconds > 0:
            body[name] = max(1, round(1000 * seconds))
    block_len = max(1, round(workload.block_tokens / replay.prompt_scale))
    return BenchRequest(
        prompt=_prompt_of(request.prefix_blocks, length, block_len, seed),
        output_len=max(1, round(request.num_output_tokens / replay.output_scale)),
        at_s=request.arrival_s * replay.time_scale,
        lane=request.lane,
        tenant=request.tenant,
        body=body,
    )


def _prompt_of(blocks: Sequence[int], length: int, block_len: int, seed: int) -> list[int]:
    tokens: list[int] = []
    for block in blocks:
        if len(tokens) >= length:
            break
        tokens += random_prompts(1, block_len, block)[0]
    tokens += random_prompts(1, max(0, length - len(tokens)), seed)[0]
    return tokens[:length]
