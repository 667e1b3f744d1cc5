"""What a client may ask of one generation, and the limits of each number: the one list that both ends of the wire use.

A field's name here is its name on the wire (`weir.v1`), in the Python client and in the OpenAI API, where it has one.
"""

from dataclasses import dataclass
from typing import Literal

from weir.core.grammar import Grammar
from weir.core.sampling import MAX_LOGPROBS

Number = int | float
Group = Literal["", "sampling", "stop_conditions"]

MAX_CHOICES = 16
"""Of `n`."""
MAX_TARGET_MS = 86_400_000
"""A day: a target that is further away is none."""


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """None and empty mean the gateway's default; `weir.v1.RequestOptions` says what each is."""

    model: str = ""
    lane: str = ""
    request_id: str = ""
    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    cache_salt: str = ""
    skips_prefix_cache: bool = False
    idempotency_key: str = ""
    resume_from: int | None = None
    ttft_target_ms: int | None = None
    itl_target_ms: int | None = None
    expected_output_tokens: int | None = None
    deadline_ms: int | None = None
    partial_at_deadline: bool = False


@dataclass(frozen=True, slots=True)
class NumberRule:
    """The range of one number. `highest` None: the model's context."""

    name: str
    group: Group
    """The message of `weir.v1.RequestOptions` that holds it."""
    lowest: Number
    highest: Number | None
    at_lowest: str = ""
    at_highest: str = ""

    def try_find_problem(self, value: Number, max_context_tokens: int) -> str | None:
        """What is wrong with a value, with the limit; None if it is in range. NaN is in no range."""
        highest = max_context_tokens if self.highest is None else self.highest
        if self.lowest <= value <= highest:
            return None
        return f"is {value}; must be {self.described(max_context_tokens)}"

    def described(self, max_context_tokens: int | None) -> str:
        """The range in words. None: which model it will be is not known here."""
        highest = max_context_tokens if self.highest is None else self.highest
        last = self.at_highest if highest is None else _shown(highest, self.at_highest)
        return f"from {_shown(self.lowest, self.at_lowest)} to {last}"


NUMBER_RULES = (
    NumberRule("n", "", 1, MAX_CHOICES),
    NumberRule("temperature", "sampling", 0, 2, at_lowest="greedy"),
    NumberRule("top_k", "sampling", 0, 2**31 - 1, at_lowest="all tokens"),
    # The wire carries 32-bit floats: less would arrive as 0.
    NumberRule("top_p", "sampling", 1e-30, 1, at_highest="all tokens"),
    NumberRule("min_p", "sampling", 0, 1, at_lowest="all tokens"),
    NumberRule("seed", "sampling", 0, 2**64 - 1),
    NumberRule("repetition_penalty", "sampling", 0.125, 8),
    NumberRule("presence_penalty", "sampling", -2, 2),
    NumberRule("frequency_penalty", "sampling", -2, 2),
    NumberRule("logprobs", "sampling", 0, MAX_LOGPROBS),
    NumberRule("prompt_logprobs", "sampling", 0, MAX_LOGPROBS),
    NumberRule("max_tokens", "stop_conditions", 1, None, at_highest="the model's context"),
    NumberRule("min_tokens", "stop_conditions", 0, None, at_highest="the model's context"),
    NumberRule("ttft_target_ms", "", 1, MAX_TARGET_MS, at_highest="a day"),
    NumberRule("itl_target_ms", "", 1, MAX_TARGET_MS, at_highest="a day"),
    NumberRule("expected_output_tokens", "", 1, None, at_highest="the model's context"),
    NumberRule("deadline_ms", "", 1, MAX_TARGET_MS, at_highest="a day"),
    NumberRule("resume_from", "", 0, None, at_highest="the model's context"),
)
_NAMES = ("model", "lane", "request_id", "cache_salt", "idempotency_key")
LOGIT_BIAS_RULE = NumberRule("logit_bias", "sampling", -100, 100)
"""Of each bias."""


def grpc_names() -> dict[str, str]:
    """The path of each option in a request of `weir.v1.Inference`, for errors that name it."""
    groups: dict[str, Group] = {rule.name: rule.group for rule in (*NUMBER_RULES, LOGIT_BIAS_RULE)}
    groups |= dict.fromkeys(("stop", "stop_token_ids", "include_stop", "ignore_eos"), "stop_conditions")
    groups["grammar"] = "sampling"
    names = {name: f"options.{group}.{name}" if group else f"options.{name}" for name, group in groups.items()}
    return names | {name: f"options.{name}" for name in _NAMES}


def _shown(limit: Number, meaning: str) -> str:
    text = str(limit) if isinstance(limit, int) else f"{limit:g}"
    return f"{text} ({meaning})" if meaning else text
