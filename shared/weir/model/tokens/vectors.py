"""A model's own token embeddings, reduced to what a predictor in front of the model can carry."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weir.core.errors import InvalidRequest
from weir.model.files.config import load_model_config
from weir.model.files.source import ModelSource
from weir.model.files.tensors import open_tensors
from weir.model.tokens.chat_template import ChatTemplate
from weir.model.tokens.tokenizer import Tokenizer
from weir.policy.predictors.token_table import ChatFrame, TokenTable, make_token_table

DEFAULT_DIMS = 576
"""All of the built-in model's; of a larger model its main directions, 75 MB for 128,000 tokens."""
_PROBES = ("A", "7", "the", "Zebra?")
_ASKED = _PROBES[0]


def load_token_table(
    source: ModelSource, tokenizer: Tokenizer, template: ChatTemplate, num_dims: int = DEFAULT_DIMS
) -> TokenTable:
    """The same on every machine that has the same files and libraries; seconds for the built-in model.

    Raises:
        ModelError: the model's embeddings cannot be read.
    """
    config = load_model_config(source)
    embeddings = open_tensors(source, config).read("model.embed_tokens.weight")
    frame = frame_of(tokenizer, template)
    return make_token_table(principal_parts(embeddings, num_dims), tokenizer.token_bytes, frame)


def principal_parts(embeddings: npt.NDArray[np.float32], num_dims: int) -> npt.NDArray[np.float32]:
    """[tokens, num_dims] of [tokens, hidden]: the directions in which tokens differ most, each of unit deviation."""
    centred = embeddings - embeddings.mean(axis=0)
    covariance = (centred.T @ centred).astype(np.float64) / len(centred)
    values, directions = np.linalg.eigh(covariance)
    best = np.argsort(values)[::-1][:num_dims]
    # a direction's sign is arbitrary: its largest component is positive
    chosen = directions[:, best]
    chosen = chosen * np.sign(chosen[np.abs(chosen).argmax(axis=0), np.arange(chosen.shape[1])])
    projection = (chosen / np.sqrt(np.maximum(values[best], 1e-12))).astype(np.float32)
    projected: npt.NDArray[np.float32] = centred @ projection
    return projected


def frame_of(tokenizer: Tokenizer, template: ChatTemplate) -> ChatFrame:
    """The tokens that the template writes around a user's message, and around an earlier answer of the assistant; none
    where there is no template, or where what it writes depends on what is said."""
    rendered = [_rendered(tokenizer, template, probe) for probe in _PROBES]
    prefix = _common(rendered)
    suffix = _common([ids[len(prefix) :][::-1] for ids in rendered])[::-1]
    turns = [_rendered(tokenizer, template, _ASKED, probe, _ASKED) for probe in _PROBES]
    head, tail = _common(turns), _common([ids[::-1] for ids in turns])[::-1]
    asked = rendered[0][len(prefix) : len(rendered[0]) - len(suffix)]
    before = head[len(prefix) + len(asked) :]
    after = tail[: len(tail) - len(asked) - len(suffix)]
    is_whole = head == [*prefix, *asked, *before] and tail == [*after, *asked, *suffix]
    has_answers_between = min(len(ids) for ids in turns) > len(head) + len(tail)
    if not (asked and before and after and is_whole and has_answers_between):
        before, after = [], []
    return ChatFrame(tuple(prefix), tuple(suffix), tuple(before), tuple(after))


def _rendered(tokenizer: Tokenizer, template: ChatTemplate, *contents: str) -> list[int]:
    """A user's message, an answer, a user's message, … Nothing if the template refuses them."""
    messages = [
        {"role": "assistant" if number % 2 else "user", "content": content} for number, content in enumerate(contents)
    ]
    try:
        return tokenizer.encode(template.render(messages), add_bos=False)
    except InvalidRequest:
        return []


def _common(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Their longest common beginning."""
    common = []
    for ids in zip(*sequences, strict=False):
        if len(set(ids)) > 1:
            break
        common.append(ids[0])
    return common
