"""Tokens of texts and conversations, and texts of tokens: of requests, and for clients that ask for nothing else."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from weir_gateway.driving.driver import Driver
from weir_gateway.requests.client_request import ClientRequest, Conversation, FieldNames, Text, TokenIds
from weir_gateway.requests.models import ModelDirectory, ServedModel
from weir_gateway.requests.validation import Limits, check_plain_prompt, prompt_field

_AnswerT = TypeVar("_AnswerT")

_TOKENIZER_THREADS = 2
# Longer texts are tokenized in a thread, so that the event loop goes on with the others.
_MAX_INLINE_CHARS = 2048
_MAX_INLINE_TOKENS = 512


class PromptTokenizer:
    """Owns its threads. Raises InvalidRequest for a text that cannot be encoded."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenize")

    async def tokenize_prompt(self, client_request: ClientRequest, model: ServedModel) -> list[int]:
        match client_request.prompt:
            case TokenIds(ids):
                return list(ids)
            case Text(text):
                return await self._tokenize(model, text, field=prompt_field(client_request))
            case Conversation(messages):
                rendered = model.chat_template.render(messages)
                # The template writes the beginning-of-sequence token itself.
                return await self._tokenize(model, rendered, field=prompt_field(client_request), add_bos=False)

    async def run(self, work: Callable[[], _AnswerT], *, is_short: bool) -> _AnswerT:
        """Here where it is short, else in a thread."""
        if is_short:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _tokenize(self, model: ServedModel, text: str, *, field: str, add_bos: bool = True) -> list[int]:
        """`field` is what the client calls the text, for errors."""

        def encode() -> list[int]:
            return model.tokenizer.encode(text, add_bos=add_bos, field=field)

        return await self.run(encode, is_short=len(text) <= _MAX_INLINE_CHARS)


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """What a client wants tokenized, in the model's way. `names`: what it calls the fields.

    `add_special_tokens`: begin with the model's beginning-of-sequence token, if it wants one; a chat template writes
    that itself. `add_generation_prompt`: a conversation ends with what asks for the assistant's next message.
    """

    model: str
    prompt: Text | Conversation
    names: FieldNames
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    """Token ids that a client wants as text, special tokens too. `names`: what it calls the fields."""

    model: str
    token_ids: TokenIds
    names: FieldNames


class Tokenization:
    """For clients that ask for nothing else. Each call takes the room of a request meanwhile: its text may be as long,
    and waits for the same threads.

    The answer is made where the tokens are: of a long text it is long too.
    """

    def __init__(self, models: ModelDirectory, limits: Limits, driver: Driver, tokenizer: PromptTokenizer) -> None:
        self._models = models
        self._limits = limits
        self._driver = driver
        self._tokenizer = tokenizer

    async def tokenize(
        self, request: TokenizeRequest, answer: Callable[[ServedModel, list[int]], _AnswerT]
    ) -> _AnswerT:
        """What `answer` makes of the model and the tokens.

        Raises InvalidRequest, NotFound without such a model, Overloaded or Unavailable where there is no room.
        """
        model = self._models.find(request.model, request.names["model"])
        check_plain_prompt(request.prompt, request.names, model, self._limits)
        with self._driver.reserve(1):
            return await self._tokenizer.run(
                lambda: answer(model, _encode(request, model)), is_short=_num_chars(request.prompt) <= _MAX_INLINE_CHARS
            )

    async def detokenize(self, request: DetokenizeRequest, answer: Callable[[str], _AnswerT]) -> _AnswerT:
        """What `answer` makes of the text. Raises as `tokenize` does."""
        model, ids = self._models.find(request.model, request.names["model"]), request.token_ids.ids
        check_plain_prompt(request.token_ids, request.names, model, self._limits)
        with self._driver.reserve(1):
            return await self._tokenizer.run(
                lambda: answer(model.tokenizer.decode(ids, skip_special=False)), is_short=len(ids) <= _MAX_INLINE_TOKENS
            )


def _encode(request: TokenizeRequest, model: ServedModel) -> list[int]:
    match request.prompt:
        case Text(text):
            field = request.names["text"]
        case Conversation(messages):
            field = request.names["messages"]
            text = model.chat_template.render(messages, add_generation_prompt=request.add_generation_prompt)
    return model.tokenizer.encode(text, add_bos=request.add_special_tokens, field=field)


def _num_chars(prompt: Text | Conversation) -> int:
    """Of a conversation without what its template adds to each turn, which is short."""
    if isinstance(prompt, Text):
        return len(prompt.text)
    return sum(len(message["content"]) for message in prompt.messages)
