"""Requests and answers as clients have them, and their translation to and from protobuf."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weir.client.chats import AnswerPart, ContentPart, ReasoningPart, parts_from_pb
from weir.core.life import FinishReason
from weir.core.options import MAX_TARGET_MS, GenerateOptions
from weir.core.sampling import TokenLogprobs
from weir.rpc.conversions import all_logprobs_from_pb, check_text, check_token_id, finish_reason_from_pb, options_to_pb
from weir.wire.v1 import admin_pb2, inference_pb2

_LAST_CHUNK_S = 5.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """A few tokens of an answer. The last chunk of a choice has `finish_reason`, the last of all the counts."""

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    """Of the prompt, found in the prefix cache."""
    choice: int = 0
    """Which of the `n` answers this belongs to."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Where they were asked for: one entry a token."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Where they were asked for, in the first chunk of choice 0: one entry a token of the prompt but the first."""
    model_digest: str = ""
    """Of the weights as the workers compute with them, with the last chunk of all; empty: not known."""
    num_reasoning_tokens: int = 0
    """Of the output's."""
    told_parts: tuple[AnswerPart, ...] | None = None
    """What is certain by now of what `text` is made of; it can lag behind. None: all of it is content."""

    @property
    def parts(self) -> tuple[AnswerPart, ...]:
        """Of what the answer is made."""
        if self.told_parts is not None:
            return self.told_parts
        return (ContentPart(self.text),) if self.text else ()

    @property
    def content(self) -> str:
        """More of what is for the reader: `text` without reasoning and calls."""
        return "".join(part.text for part in self.parts if isinstance(part, ContentPart))

    @property
    def reasoning(self) -> str:
        """More of what the model thinks."""
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningPart))

    @classmethod
    def from_pb(cls, response: inference_pb2.GenerateResponse | inference_pb2.ChatResponse) -> "Chunk":
        return cls(
            request_id=response.request_id,
            first_index=response.first_index,
            token_ids=tuple(response.token_ids),
            text=response.text,
            finish_reason=finish_reason_from_pb(response.finish_reason),
            num_prompt_tokens=response.usage.num_prompt_tokens,
            num_output_tokens=response.usage.num_output_tokens,
            num_cached_tokens=response.usage.num_cached_tokens,
            model_digest=response.model_digest,
            choice=response.choice,
            logprobs=all_logprobs_from_pb(response.logprobs),
            prompt_logprobs=all_logprobs_from_pb(response.prompt_logprobs),
            num_reasoning_tokens=response.usage.num_reasoning_tokens,
            told_parts=_try_read_parts(response),
        )


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One model that the gateway serves."""

    name: str
    max_context_tokens: int
    vocab_size: int
    aliases: tuple[str, ...] = ()
    """Further names for it."""

    @classmethod
    def from_pb(cls, model: inference_pb2.Model) -> "ModelInfo":
        return cls(model.name, model.max_context_tokens, model.vocab_size, tuple(model.aliases))


@dataclass(frozen=True, slots=True)
class ProcessDescription:
    """What one process reports of itself: counters (`…_total`) and gauges, and what is wrong inside of it."""

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


def _try_read_parts(
    response: inference_pb2.GenerateResponse | inference_pb2.ChatResponse,
) -> tuple[AnswerPart, ...] | None:
    if isinstance(response, inference_pb2.ChatResponse) and response.HasField("parts"):
        return parts_from_pb(response.parts)
    return None


def with_deadline(options: GenerateOptions, timeout_s: float) -> tuple[GenerateOptions, float]:
    """The options and the time-out of the call: what there is at the deadline takes a moment to arrive after it."""
    if not options.partial_at_deadline:
        return options, timeout_s
    timeout_ms = max(1, min(int(timeout_s * 1000), MAX_TARGET_MS))
    deadline_ms = timeout_ms if options.deadline_ms is None else min(timeout_ms, options.deadline_ms)
    return replace(options, deadline_ms=deadline_ms), timeout_s + _LAST_CHUNK_S


def generate_request(prompt: str | Sequence[int], options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """A text prompt, or ready token ids. Raises InvalidRequest for what the wire cannot carry."""
    if isinstance(prompt, str):
        check_text("text", prompt)
        return inference_pb2.GenerateRequest(options=options_to_pb(options), text=prompt)
    for index, token_id in enumerate(prompt):
        check_token_id(f"token_ids[{index}]", token_id)
    return inference_pb2.GenerateRequest(options=options_to_pb(options), token_ids=inference_pb2.TokenIds(ids=prompt))


def tokenize_request(text: str, model: str) -> inference_pb2.TokenizeRequest:
    """Raises InvalidRequest for what the wire cannot carry."""
    check_text("text", text)
    check_text("model", model)
    return inference_pb2.TokenizeRequest(model=model, text=text)


def cancel_request(request_id: str) -> inference_pb2.CancelRequest:
    """Raises InvalidRequest for what the wire cannot carry."""
    check_text("request_id", request_id)
    return inference_pb2.CancelRequest(request_id=request_id)
