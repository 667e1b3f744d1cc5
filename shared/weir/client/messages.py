"""What clients say and hear, and its translation from and to protobuf."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from weir.wire.v1 import inference_pb2, types_pb2

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

    def to_pb(self) -> inference_pb2.RequestOptions:
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


def generate_request(prompt: str | Sequence[int], options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """A text prompt, or ready token ids."""
    if isinstance(prompt, str):
        return inference_pb2.GenerateRequest(options=options.to_pb(), text=prompt)
    return inference_pb2.GenerateRequest(options=options.to_pb(), token_ids=inference_pb2.TokenIds(ids=prompt))


def chat_request(turns: Sequence[Turn], options: GenerateOptions) -> inference_pb2.ChatRequest:
    """The turns, oldest first."""
    messages = [inference_pb2.ChatMessage(role=turn.role, content=turn.content) for turn in turns]
    return inference_pb2.ChatRequest(options=options.to_pb(), messages=messages)
