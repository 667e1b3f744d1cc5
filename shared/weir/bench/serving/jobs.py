"""Parts of requests: prompts that follow from a seed, lanes and tenants by their shares, words for token ids."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from weir.bench.serving.records import BenchRequest

_TOKEN_LOW = 1000
_TOKEN_HIGH = 40_000
_COMMON = (
    "the of and to in is was for on that with as it at by from he be his this are or had not but her they an were which"
    " you one we all their has been have who will more if out so up said what its about than into them can only other"
    " time new some could these two may first then do any like my now over such our man me even most made after also"
    " well many must before back through years where much your way down should because long each just state people too"
    " those how little world good make very year still see own work men day get here between both life under never last"
)
_WORDS = tuple(_COMMON.split())
"""Of one token in most vocabularies."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Names with their shares of the requests, which need not add up to 1. Without names every request has none."""

    shares: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "Mix":
        """Of `interactive=0.2,batch=0.8`. Raises ValueError."""
        shares: dict[str, float] = {}
        for part in text.split(",") if text else ():
            name, _, share = part.partition("=")
            try:
                value = float(share)
            except ValueError:
                value = -1.0
            if not name.strip() or name.strip() in shares or not 0 < value < float("inf"):
                raise ValueError(f"mix {text!r}: {part!r} must be NAME=SHARE with a share above 0, each name once")
            shares[name.strip()] = value
        return cls(shares)

    def draw(self, num: int, seed: int) -> list[str]:
        if not self.shares:
            return [""] * num
        return random.Random(seed).choices(list(self.shares), list(self.shares.values()), k=num)


def random_prompts(num: int, length: int, seed: int) -> list[list[int]]:
    """Token ids, the same for the same seed."""
    source = random.Random(seed)
    return [[source.randrange(_TOKEN_LOW, _TOKEN_HIGH) for _ in range(length)] for _ in range(num)]


def random_prompt(length: int, source: random.Random) -> list[int]:
    return [source.randrange(_TOKEN_LOW, _TOKEN_HIGH) for _ in range(length)]


def mixed(jobs: Sequence[BenchRequest], lanes: Mix, tenants: Mix, seed: int) -> list[BenchRequest]:
    """The jobs with lanes and tenants by shares, where there are any: those of a trace stay otherwise."""
    sampled = zip(jobs, lanes.draw(len(jobs), seed + 2), tenants.draw(len(jobs), seed + 3), strict=True)
    return [replace(job, lane=lane or job.lane, tenant=tenant or job.tenant) for job, lane, tenant in sampled]


def at_times(jobs: Sequence[BenchRequest], times_s: Sequence[float]) -> list[BenchRequest]:
    return [replace(job, at_s=at_s) for job, at_s in zip(jobs, times_s, strict=True)]


def as_text(prompt: Sequence[int] | str) -> str:
    """A word for each id: prompts that begin alike do so as texts, too."""
    if isinstance(prompt, str):
        return prompt
    return " ".join(_WORDS[token_id % len(_WORDS)] for token_id in prompt)
