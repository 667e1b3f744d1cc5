"""Tokens of texts and conversations, and texts of tokens: of requests, and for clients that ask for nothing else."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from weir.core.errors import DeadlineExceeded, FieldViolation, InvalidRequest, Overloaded, QuotaExceeded
from weir.model.tokens.tokenizer import MAX_CHARS_AT_ONCE
from weir_gateway.access import Caller
from weir_gateway.driving.driver import Driver
from weir_gateway.requests.client_request import ClientRequest, Conversation, FieldNames, Text, TokenIds
from weir_gateway.requests.grammars import GrammarChecks
from weir_gateway.requests.models import ModelDirectory, ServedModel
from weir_gateway.requests.request_end import RETRY_AFTER_S
from weir_gateway.requests.validation import Limits, check_plain_prompt, prompt_field
from weir_gateway.tenant_threads import TenantThreads

_AnswerT = TypeVar("_AnswerT")

_MAX_INLINE_TOKENS = 512
_MAX_INLINE_MESSAGES = 64
_NUMBER_CHARS = 8
_USUAL_CHARS = 8
"""Of a token, at most."""
_FAR = 1.25


def _hear_nothing() -> None: ...


class PromptTokenizer:
    """What is long is done in the tenants' threads. Raises InvalidRequest for a text that cannot be encoded, and for a
    conversation that the model does not take."""

    def __init__(self, threads: TenantThreads) -> None:
        self._threads = threads
        self.grammars = GrammarChecks()

    async def tokenize_prompt(self, client_request: ClientRequest, model: ServedModel, caller: Caller) -> list[int]:
        prompt = client_request.prompt
        if isinstance(prompt, TokenIds):
            return list(prompt.ids)
        field = prompt_field(prompt, client_request.names)

        def check() -> None:
            _check_is_not_far_longer(_sure_text(prompt), model, field)

        try:
            # A template writes the beginning-of-sequence token itself.
            return await self.encode(
                prompt, model, caller, field=field, add_bos=isinstance(prompt, Text), answer=list, on_begin=check
            )
        except InvalidRequest:
            if not _is_short(prompt):
                self._threads.charge_refused(caller)
            raise

    async def encode(
        self,
        prompt: Text | Conversation,
        model: ServedModel,
        caller: Caller,
        *,
        field: str,
        add_bos: bool,
        answer: Callable[[list[int]], _AnswerT],
        on_begin: Callable[[], None] = _hear_nothing,
    ) -> _AnswerT:
        """What `answer` makes of the tokens, where they are made: of a long text it is long too. `field` is what the
        client calls the prompt, for errors. `on_begin` is called where and when it is worked on first; what it raises
        ends that."""

        def write_out() -> str:
            on_begin()
            return plain_text(prompt, model)

        def work(text: str) -> _AnswerT:
            return answer(model.tokenizer.encode(text, add_bos=add_bos, field=field))

        if not _is_short(prompt):
            return await self._threads.run(caller, lambda: work(write_out()), is_short=False)
        text = write_out()  # of which a template may make more than there was
        return await self._threads.run(caller, lambda: work(text), is_short=len(text) <= MAX_CHARS_AT_ONCE)

    async def decode(
        self,
        token_ids: tuple[int, ...],
        model: ServedModel,
        caller: Caller,
        *,
        answer: Callable[[str], _AnswerT],
        on_begin: Callable[[], None],
    ) -> _AnswerT:
        """What `answer` makes of the text, special tokens in it too. `on_begin` as of `encode`."""

        def work() -> _AnswerT:
            on_begin()
            return answer(model.tokenizer.decode(token_ids, skip_special=False))

        return await self._threads.run(caller, work, is_short=len(token_ids) <= _MAX_INLINE_TOKENS)

    def close(self) -> None:
        self.grammars.close()


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """What a client wants tokenized, in the model's way. `names`: what it calls the fields.

    `add_special_tokens`: begin with the model's beginning-of-sequence token, if it wants one; a chat template writes
    that itself.
    """

    model: str
    prompt: Text | Conversation
    names: FieldNames
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    """Token ids that a client wants as text, special tokens too. `names`: what it calls the fields."""

    model: str
    token_ids: TokenIds
    names: FieldNames


class Tokenization:
    """For clients that ask for nothing else. Prompts of requests wait for the same threads, so few calls may wait
    before them, and some of these are left for other tenants.

    Each that is worked on is one of the requests that its tenant may have a minute, however it ends: else calls that
    are made to fail late, or to be given up, would be had for nothing. What is refused before that, or has no turn in
    its time, costs nothing."""

    def __init__(self, models: ModelDirectory, limits: Limits, driver: Driver, tokenizer: PromptTokenizer) -> None:
        self._models = models
        self._limits = limits
        self._driver = driver
        self._tokenizer = tokenizer
        self._num_calls: Counter[str] = Counter()
        """By tenant."""

    @property
    def num_calls(self) -> int:
        """That wait, or are being done."""
        return self._num_calls.total()

    def check_room(self, caller: Caller) -> None:
        """Before a call is read. Raises Overloaded, QuotaExceeded where the tenant has its part of the room, or has had
        all that it may have for now, and Unavailable while the gateway shuts down."""
        self._driver.check_is_open()
        limits, num_calls, num_own = self._limits, self.num_calls, self._num_calls[caller.tenant]
        if num_calls >= limits.max_tokenize_calls:
            message = f"{num_calls} calls wait for tokens, at most {limits.max_tokenize_calls}; try again later"
            raise Overloaded(message, retry_after_s=RETRY_AFTER_S)
        if num_own >= limits.max_tokenize_calls_of_tenant:
            message = (
                f"tenant {caller.tenant}: {num_own} of its calls wait for tokens, at most "
                f"{limits.max_tokenize_calls_of_tenant}; try again later"
            )
            raise QuotaExceeded(message, retry_after_s=RETRY_AFTER_S, tenant=caller.tenant)
        wait_s = self._driver.quotas.call_wait_s(caller.tenant, caller.requests_per_min)
        if wait_s > 0:
            message = (
                f"tenant {caller.tenant}: over {caller.requests_per_min:g} requests a minute, its requests_per_min, "
                "with its calls for tokens; try again later"
            )
            raise QuotaExceeded(message, retry_after_s=wait_s, tenant=caller.tenant, bound="requests_per_min")

    async def tokenize(
        self, request: TokenizeRequest, caller: Caller, answer: Callable[[ServedModel, list[int]], _AnswerT]
    ) -> _AnswerT:
        """What `answer` makes of the model and the tokens.

        Raises InvalidRequest, NotFound without such a model, DeadlineExceeded, and what `check_room` raises.
        """
        model = self._models.find(request.model, request.names["model"])
        check_plain_prompt(request.prompt, request.names, model, self._limits)
        async with self._waiting(caller) as on_begin:
            return await self._tokenizer.encode(
                request.prompt,
                model,
                caller,
                field=prompt_field(request.prompt, request.names),
                add_bos=request.add_special_tokens,
                answer=lambda token_ids: answer(model, token_ids),
                on_begin=on_begin,
            )

    async def detokenize(
        self, request: DetokenizeRequest, caller: Caller, answer: Callable[[str], _AnswerT]
    ) -> _AnswerT:
        """What `answer` makes of the text. Raises as `tokenize` does."""
        model = self._models.find(request.model, request.names["model"])
        check_plain_prompt(request.token_ids, request.names, model, self._limits)
        async with self._waiting(caller) as on_begin:
            return await self._tokenizer.decode(request.token_ids.ids, model, caller, answer=answer, on_begin=on_begin)

    @asynccontextmanager
    async def _waiting(self, caller: Caller) -> AsyncIterator[Callable[[], None]]:
        """A call takes its room, and not for longer than it may wait. It is paid for at once, so that those that wait
        count, and paid back if it has not begun by its end: what to call then, from whichever thread."""
        self.check_room(caller)
        quotas, per_min, begun = self._driver.quotas, caller.requests_per_min, threading.Event()
        quotas.pay_call(caller.tenant, per_min)
        self._num_calls[caller.tenant] += 1
        try:
            async with asyncio.timeout(self._limits.tokenize_timeout_s):
                yield begun.set
        except TimeoutError:
            message = (
                f"not done within {self._limits.tokenize_timeout_s:g} s, all that such a call may take; try again later"
            )
            raise DeadlineExceeded(message, retry_after_s=RETRY_AFTER_S) from None
        finally:
            if not begun.is_set():
                quotas.give_call_back(caller.tenant, per_min)
            self._num_calls[caller.tenant] -= 1
            if not self._num_calls[caller.tenant]:
                del self._num_calls[caller.tenant]


def plain_text(prompt: Text | Conversation, model: ServedModel) -> str:
    """What the model reads: of a conversation what its template makes of it."""
    if isinstance(prompt, Text):
        return prompt.text
    return model.chat_template.render(
        prompt.messages,
        tools=() if prompt.tools is None else prompt.tools.definitions,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        variables=prompt.template_variables,
    )


def is_far_longer(text: str, num_tokens: int, encode: Callable[[str], list[int]]) -> bool:
    """Than so many tokens, as its beginning tells, which costs no more where the text is longer still. False: encode it
    to know. Where a text is cut its last tokens may be others, of which no model's are a quarter."""
    num_chars = _USUAL_CHARS * num_tokens
    while num_chars < len(text):
        if len(encode(text[:num_chars])) > num_tokens * _FAR:
            return True
        num_chars *= 4
    return False


def _check_is_not_far_longer(text: str, model: ServedModel, field: str) -> None:
    """Than the model's context. Raises InvalidRequest."""
    context = model.max_context_tokens
    if is_far_longer(text, context, partial(model.tokenizer.encode, add_bos=False, field=field)):
        limit = f"{model.name} takes at most {context - 1}, so that one token of output fits"
        raise InvalidRequest([FieldViolation(field, f"is more than {context} tokens; {limit}")])


def _sure_text(prompt: Text | Conversation) -> str:
    """What the model reads of it whatever its template is: of others' turns some leave parts out."""
    if isinstance(prompt, Text):
        return prompt.text
    return "".join(one["content"] for one in prompt.messages if one["role"] == "user")


def _is_short(prompt: Text | Conversation) -> bool:
    """Whether no thread is worth it."""
    if isinstance(prompt, Text):
        return len(prompt.text) <= MAX_CHARS_AT_ONCE
    if len(prompt.messages) > _MAX_INLINE_MESSAGES:
        return False
    parts: list[object] = [] if prompt.tools is None else [prompt.tools.definitions]
    for one in prompt.messages:
        parts += (one["content"], one.get("reasoning_content"), one.get("tool_calls"))
    return not _is_longer(parts, MAX_CHARS_AT_ONCE)


def _is_longer(value: object, max_chars: int) -> bool:
    """Than about so many characters of JSON, of which no more are counted."""
    num_chars, rest = 0, [value]
    while rest and num_chars <= max_chars:
        part = rest.pop()
        if isinstance(part, str):
            num_chars += len(part)
        elif isinstance(part, Mapping):
            num_chars += len(part)
            rest += (*part.keys(), *part.values()) if num_chars <= max_chars else ()
        elif isinstance(part, list | tuple):
            num_chars += len(part)
            rest += part if num_chars <= max_chars else ()
        elif part is not None:
            num_chars += _NUMBER_CHARS
    return num_chars > max_chars
