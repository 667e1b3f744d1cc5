"""Log-probabilities in the forms of OpenAI's API, and of vLLM's where OpenAI has none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weir.core.logprobs import TokenLogprobs

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LogprobsRenderer:
    """`token_bytes` spells a token of the model; a token can be half a character, so its text may lose what its bytes
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
