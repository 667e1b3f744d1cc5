"""Answers in the forms of OpenAI's API: whole, in chunks, and errors."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weir.core.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
    WeirError,
)
from weir.core.life import FinishReason
from weir.core.sampling import TokenLogprobs
from weir_gateway.answers.events import AnswerEvent
from weir_gateway.driving.open_request import OpenRequest
from weir_gateway.frontends.openai.parts import delta_parts, message_parts, without_reasoning
from weir_gateway.requests.client_request import Operation, Text
from weir_gateway.requests.output import OutputDelta

Json = dict[str, Any]

BOUND_HEADER = "X-Weir-Bound"
"""Of a 429: the bound of the tenant that is reached, by its key in the limits file."""

_MAX_MESSAGE_CHARS = 2000

# error -> HTTP status, `type`, `code`
_ERRORS: tuple[tuple[type[WeirError], int, str, str], ...] = (
    (InvalidRequest, 400, "invalid_request_error", "invalid_value"),
    (Unauthenticated, 401, "authentication_error", "invalid_api_key"),
    (PermissionDenied, 403, "permission_error", "permission_denied"),
    (NotFound, 404, "not_found_error", "not_found"),
    (AlreadyExists, 409, "conflict_error", "already_exists"),
    (QuotaExceeded, 429, "rate_limit_error", "rate_limit_exceeded"),
    (Overloaded, 429, "rate_limit_error", "overloaded"),
    (Cancelled, 499, "cancelled_error", "cancelled"),
    (Unavailable, 503, "service_unavailable", "unavailable"),
    (DeadlineExceeded, 504, "timeout_error", "deadline_exceeded"),
    (WeirError, 500, "internal_error", "internal"),
)


@dataclass(frozen=True, slots=True)
class Rendering:
    """What a client wants of the form of its answer.

    `includes_usage`: token counts at a stream's end, with `has_continuous_usage` so far in each chunk too. `echoes`: a
    completion begins with its prompt, and its log-probabilities with the prompt's. `drops_output`: nothing else is
    wanted. `shows_prompt_logprobs`: in vLLM's form. `shows_reasoning`: else it is computed, and left out.
    """

    includes_usage: bool = False
    has_continuous_usage: bool = False
    returns_token_ids: bool = False
    shows_prompt_logprobs: bool = True
    echoes: bool = False
    drops_output: bool = False
    shows_reasoning: bool = True

    @property
    def has_plain_chunks(self) -> bool:
        """Whether chunks without log-probabilities differ in nothing but their text."""
        return not (self.has_continuous_usage or self.returns_token_ids or self.drops_output)


class AnswerRenderer:
    """Renders the answer to one request: whole, or opening, chunks and closing."""

    def __init__(self, opened: OpenRequest, rendering: Rendering) -> None:
        self.rendering = rendering
        self._opened = opened
        self._is_chat = opened.checked.client_request.operation is Operation.CHAT
        self._logprobs = LogprobsRenderer(opened.checked.model.tokenizer.token_bytes)
        self._created_unix_s = int(time.time())
        self._has_parts = opened.states[0].output.has_parts
        self._ids = opened.call_ids()
        self._echoes: dict[int, str] = {}
        """By prompt."""

    @property
    def num_prompt_ids(self) -> int:
        """That are shown, or whose text is: over all choices."""
        if not (self.rendering.echoes or self.rendering.returns_token_ids):
            return 0
        shown = self._opened.states[:1] if self._is_chat else self._opened.states
        return sum(len(state.checked.prompt_token_ids) for state in shown)

    @property
    def num_output_ids(self) -> int:
        """That are shown, of those there are now: over all choices."""
        return self._opened.num_output_tokens if self.rendering.returns_token_ids else 0

    def whole(self, outputs: Sequence[OutputDelta]) -> Json:
        """The answer that is not streamed; `outputs` are its choices in order, complete."""
        choices = [self._whole_choice(output, outputs) for output in outputs]
        answer = {**self._head(is_chunk=False), "choices": choices, "usage": self._usage()}
        return {**answer, **self._prompt_ids_of_chat()}

    def opening(self) -> list[Json]:
        """What a stream begins with, before any text of the model's."""
        chunks = []
        for index in range(len(self._opened.states)):
            if self._is_chat:
                # null: text may come, or calls of tools, and clients join null and a text to that text
                empty = None if self._has_parts else ""
                content: Json = {"delta": {"role": "assistant", "content": empty}}
            elif self.rendering.echoes or self.rendering.returns_token_ids:
                content = {"text": self._echo(index), **self._prompt_ids_of_completion(index)}
            else:
                continue
            chunks.append(self._chunk({"index": index, **content, "logprobs": None, "finish_reason": None}))
        if chunks:
            chunks[0] |= self._prompt_ids_of_chat()
        return chunks

    def chunk(self, delta: OutputDelta, text_offset: int) -> Json:
        """Part of a choice, the last one with a finish reason. `text_offset`: characters of the choice before it."""
        text = "" if self.rendering.drops_output else delta.text
        if delta.events is not None:
            content: Json = {"delta": delta_parts(self._shown(delta.events), self._ids[delta.choice].of)}
        else:
            content = {"delta": {"content": text} if text else {}} if self._is_chat else {"text": text}
        return self._chunk(self._choice(delta, content, text_offset))

    def closing(self) -> list[Json]:
        """What follows the last delta: the token counts, if they were asked for."""
        if not self.rendering.includes_usage:
            return []
        return [{**self._head(is_chunk=True), "choices": [], "usage": self._usage()}]

    def _whole_choice(self, output: OutputDelta, outputs: Sequence[OutputDelta]) -> Json:
        if self._is_chat:
            parts: Json = {"content": output.text}
            if output.events is not None:
                parts = message_parts(self._shown(output.events), self._ids[output.choice].of)
            content: Json = {"message": {"role": "assistant", **parts, "refusal": None}}
        else:
            text = "" if self.rendering.drops_output else output.text
            content = {"text": self._echo(output.choice) + text, **self._prompt_ids_of_completion(output.choice)}
        choice = self._choice(output, content, 0)
        if output.prompt_logprobs and self.rendering.shows_prompt_logprobs:
            choice["prompt_logprobs"] = self._logprobs.prompt_json(output.prompt_logprobs)
        if self.rendering.echoes and self._opened.checked.sampling.logprobs is not None:
            # computed once a prompt, with its first answer
            of_prompt = outputs[output.choice - output.choice % self._opened.num_answers].prompt_logprobs
            choice["logprobs"] = self._echoed_logprobs(output, of_prompt)
        return choice

    def _choice(self, delta: OutputDelta, content: Json, text_offset: int) -> Json:
        logprobs = None
        if delta.logprobs and not self.rendering.drops_output:
            chat, completion = self._logprobs.chat_json, self._logprobs.completion_json
            logprobs = chat(delta.logprobs) if self._is_chat else completion(delta.logprobs, text_offset)
        choice = {"index": delta.choice, **content, "logprobs": logprobs, "finish_reason": None}
        if self.rendering.returns_token_ids:
            choice["token_ids"] = [] if self.rendering.drops_output else list(delta.token_ids)
        if delta.finish_reason is FinishReason.DEADLINE:
            # Clients with strict types know five finish reasons and fail at a sixth; "length" is what it is to them.
            return {**choice, "finish_reason": FinishReason.LENGTH.value, "finish_details": {"type": "deadline"}}
        if delta.finish_reason is not None:
            reason = FinishReason.LENGTH if self.rendering.drops_output else delta.finish_reason
            choice["finish_reason"] = "tool_calls" if self._ends_with_calls(delta.choice) else reason.value
        return choice

    def _shown(self, events: Sequence[AnswerEvent]) -> Sequence[AnswerEvent]:
        return events if self.rendering.shows_reasoning else without_reasoning(events)

    def _ends_with_calls(self, choice: int) -> bool:
        """Of a function that the client named OpenAI has it that the answer just ends."""
        tools = self._opened.checked.client_request.tools
        return tools is not None and not tools.is_named and self._opened.states[choice].output.ends_with_calls

    def _echo(self, choice: int) -> str:
        """The prompt of a choice, if it is wanted, as it was sent."""
        if not self.rendering.echoes:
            return ""
        checked = self._opened.states[choice].checked
        prompt = checked.client_request.prompt
        if isinstance(prompt, Text):
            return prompt.text
        index = choice // self._opened.num_answers
        if index not in self._echoes:
            self._echoes[index] = checked.model.tokenizer.decode(checked.prompt_token_ids, skip_special=False)
        return self._echoes[index]

    def _echoed_logprobs(self, output: OutputDelta, of_prompt: Sequence[TokenLogprobs]) -> Json:
        """`choices[].logprobs` over prompt and output; its first token has none, for nothing comes before it."""
        first = self._opened.states[output.choice].checked.prompt_token_ids[0]
        of_output = () if self.rendering.drops_output else output.logprobs
        found = self._logprobs.completion_json([TokenLogprobs.unknown(first), *of_prompt, *of_output], 0)
        found["token_logprobs"][0] = found["top_logprobs"][0] = None
        return found

    def _prompt_ids_of_completion(self, choice: int) -> Json:
        if not self.rendering.returns_token_ids:
            return {}
        return {"prompt_token_ids": list(self._opened.states[choice].checked.prompt_token_ids)}

    def _prompt_ids_of_chat(self) -> Json:
        if not (self._is_chat and self.rendering.returns_token_ids):
            return {}
        return {"prompt_token_ids": list(self._opened.checked.prompt_token_ids)}

    def _chunk(self, choice: Json) -> Json:
        chunk = {**self._head(is_chunk=True), "choices": [choice]}
        if self.rendering.has_continuous_usage:
            return {**chunk, "usage": self._usage()}
        return {**chunk, "usage": None} if self.rendering.includes_usage else chunk

    def _usage(self) -> Json:
        num_prompt = self._opened.num_prompt_tokens
        num_output = 0 if self.rendering.drops_output else self._opened.num_output_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": self._opened.num_cached_tokens},
            **self._output_details(),
        }

    def _output_details(self) -> Json:
        if self._opened.checked.model.answer_format.reasoning is None:
            return {}
        return {"completion_tokens_details": {"reasoning_tokens": self._opened.num_reasoning_tokens}}

    def _head(self, *, is_chunk: bool) -> Json:
        if self._is_chat:
            prefix, kind = "chatcmpl", "chat.completion.chunk" if is_chunk else "chat.completion"
        else:
            prefix, kind = "cmpl", "text_completion"
        model = self._opened.checked.model
        head: Json = {
            "id": f"{prefix}-{self._opened.request_id}",
            "object": kind,
            "created": self._created_unix_s,
            "model": model.name,
        }
        return {**head, "system_fingerprint": model.fingerprint} if model.digest else head


@dataclass(frozen=True, slots=True)
class LogprobsRenderer:
    """Log-probabilities in OpenAI's forms, and in vLLM's where OpenAI has none.

    `token_bytes` spells a token of the model; a token can be half a character, so its text may lose what its bytes
    have.
    """

    token_bytes: Callable[[int], bytes]

    def chat_json(self, logprobs: Sequence[TokenLogprobs]) -> Json:
        """`choices[].logprobs` of a chat."""
        content = [
            {
                **self._token_json(entry.token_id, entry.logprob),
                "top_logprobs": [self._token_json(token_id, logprob) for token_id, logprob in entry.top],
            }
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}

    def completion_json(self, logprobs: Sequence[TokenLogprobs], text_offset: int) -> Json:
        """`choices[].logprobs` of a completion; the chosen token is among the top ones, even beyond their number."""
        texts = [self._text(entry.token_id) for entry in logprobs]
        offsets = []
        for text in texts:
            offsets.append(text_offset)
            text_offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": [
                {self._text(token_id): logprob for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob))}
                for entry in logprobs
            ],
            "text_offset": offsets,
        }

    def prompt_json(self, logprobs: Sequence[TokenLogprobs]) -> list[Json | None]:
        """vLLM's `prompt_logprobs`: by token id; the prompt's first token has none."""
        return [None, *(self._prompt_token_json(entry) for entry in logprobs)]

    def _prompt_token_json(self, entry: TokenLogprobs) -> Json:
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, start=1)]
        return {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": self._text(token_id)}
            for token_id, logprob, rank in ((entry.token_id, entry.logprob, entry.rank), *ranked)
        }

    def _token_json(self, token_id: int, logprob: float) -> Json:
        return {"token": self._text(token_id), "logprob": logprob, "bytes": list(self.token_bytes(token_id))}

    def _text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")


def error_status(error: WeirError) -> int:
    """The HTTP status of the table in `core.errors`."""
    return _entry_of(error)[1]


def error_body(error: WeirError) -> Json:
    """The nested form that OpenAI's clients parse; `param` names the first wrong field."""
    _, _, kind, code = _entry_of(error)
    param = None
    if isinstance(error, InvalidRequest):
        param = error.violations[0].field
    elif isinstance(error, NotFound | AlreadyExists):
        param = error.field
    return {"error": {"message": error.message[:_MAX_MESSAGE_CHARS], "type": kind, "param": param, "code": code}}


def error_headers(error: WeirError) -> dict[str, str]:
    """`Retry-After` in whole seconds, at least 1, if trying again makes sense, and the bound reached; for 401 how to
    authenticate."""
    if isinstance(error, Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}
    if error.retry_after_s is None:
        return {}
    bound = {BOUND_HEADER: error.bound} if isinstance(error, QuotaExceeded) and error.bound else {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))} | bound


def _entry_of(error: WeirError) -> tuple[type[WeirError], int, str, str]:
    return next(entry for entry in _ERRORS if isinstance(error, entry[0]))
