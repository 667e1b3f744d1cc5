"""From a prompt in any of its forms to token ids, long ones in a thread."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from weir_gateway.requests.client_request import ClientRequest, Conversation, Text, TokenIds
from weir_gateway.requests.models import ServedModel
from weir_gateway.requests.validation import prompt_field

_NUM_THREADS = 2
# Longer texts are tokenized in a thread, so that the event loop goes on with the others.
_MAX_INLINE_CHARS = 2048


class PromptTokenizer:
    """Owns its threads. Raises InvalidRequest for a text that cannot be encoded."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")

    async def tokenize_prompt(self, client_request: ClientRequest, model: ServedModel) -> list[int]:
        match client_request.prompt:
            case TokenIds(ids):
                return list(ids)
            case Text(text):
                return await self.tokenize(model, text, field=prompt_field(client_request))
            case Conversation(messages):
                rendered = model.chat_template.render(messages)
                # The template writes the beginning-of-sequence token itself.
                return await self.tokenize(model, rendered, field=prompt_field(client_request), add_bos=False)

    async def tokenize(self, model: ServedModel, text: str, *, field: str, add_bos: bool = True) -> list[int]:
        """`field` is what the client calls the text, for errors."""

        def encode() -> list[int]:
            return model.tokenizer.encode(text, add_bos=add_bos, field=field)

        if len(text) <= _MAX_INLINE_CHARS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._executor, encode)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
