"""What clients say and hear, and its translation from and to protobuf."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from weir.core.errors import FieldViolation, InvalidRequest
from weir.wire.v1 import admin_pb2, inference_pb2, types_pb2

_MAX_UINT32 = 2**32 - 1
_MAX_UINT64 = 2**64 - 1

FinishReason = Literal["stop", "length", "cancelled"]

_FINISH_REASONS: dict[int, FinishReason] = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """None and empty mean the gateway's default; `weir.v1.RequestOptions` says what each is."""

    model: str = ""
    lane: str = ""
    request_id: str = ""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    cache_salt: str = ""
    skips_prefix_cache: bool = False

    def to_pb(self) -> inference_pb2.RequestOptions:
        """Raises InvalidRequest for numbers that the wire cannot carry; the gateway checks all others."""
        _check_range("top_k", self.top_k, _MAX_UINT32)
        _check_range("seed", self.seed, _MAX_UINT64)
        _check_range("max_tokens", self.max_tokens, _MAX_UINT32)
        for index, token_id in enumerate(self.stop_token_ids):
            _check_range(f"stop_token_ids[{index}]", token_id, _MAX_UINT32)
        sampling = types_pb2.SamplingParams(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed
        )
        stop_conditions = inference_pb2.StopConditions(
            max_tokens=self.max_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
        )
        return inference_pb2.RequestOptions(
            request_id=self.request_id,
            model=self.model,
            lane=self.lane,
            sampling=sampling,
            stop_conditions=stop_conditions,
            cache_salt=self.cache_salt,
            skips_prefix_cache=self.skips_prefix_cache,
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A few tokens of an answer. The last chunk has `finish_reason` and the counts."""

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    """Of the prompt, found in the prefix cache."""

    @classmethod
    def from_pb(cls, response: inference_pb2.GenerateResponse | inference_pb2.ChatResponse) -> "Chunk":
        return cls(
            request_id=response.request_id,
            first_index=response.first_index,
            token_ids=tuple(response.token_ids),
            text=response.text,
            finish_reason=_FINISH_REASONS.get(response.finish_reason),
            num_prompt_tokens=response.usage.num_prompt_tokens,
            num_output_tokens=response.usage.num_output_tokens,
            num_cached_tokens=response.usage.num_cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One model that the gateway serves."""

    name: str
    max_context_tokens: int
    vocab_size: int

    @classmethod
    def from_pb(cls, model: inference_pb2.Model) -> "ModelInfo":
        return cls(model.name, model.max_context_tokens, model.vocab_size)


@dataclass(frozen=True, slots=True)
class ProcessDescription:
    """What one process says about itself: counters (`…_total`) and gauges, and what is wrong with its books."""

    role: str
    process_id: str
    pid: int
    model: str
    uptime_s: float
    metrics: Mapping[str, float]
    integrity_errors: tuple[str, ...]

    @classmethod
    def from_pb(cls, response: admin_pb2.DescribeResponse) -> "ProcessDescription":
        return cls(
            role=response.role,
            process_id=response.process_id,
            pid=response.pid,
            model=response.model,
            uptime_s=response.uptime_ms / 1000,
            metrics=dict(response.metrics),
            integrity_errors=tuple(response.integrity_errors),
        )


def generate_request(prompt: str | Sequence[int], options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """A text prompt, or ready token ids. Raises InvalidRequest for what the wire cannot carry."""
    if isinstance(prompt, str):
        return inference_pb2.GenerateRequest(options=options.to_pb(), text=prompt)
    for index, token_id in enumerate(prompt):
        _check_range(f"token_ids[{index}]", token_id, _MAX_UINT32)
    return inference_pb2.GenerateRequest(options=options.to_pb(), token_ids=inference_pb2.TokenIds(ids=prompt))


def chat_request(turns: Sequence[Turn], options: GenerateOptions) -> inference_pb2.ChatRequest:
    """The turns, oldest first."""
    messages = [inference_pb2.ChatMessage(role=turn.role, content=turn.content) for turn in turns]
    return inference_pb2.ChatRequest(options=options.to_pb(), messages=messages)


def _check_range(field: str, value: int | None, largest: int) -> None:
    if value is not None and not 0 <= value <= largest:
        raise InvalidRequest([FieldViolation(field, f"is {value}; must be from 0 to {largest}")])
