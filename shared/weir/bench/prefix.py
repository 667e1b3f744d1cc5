"""`weir bench prefix`: what the prefix cache saves on a running stack, with and without it in turns.

Chats of two turns, one after the other: the second turn should compute its new tokens and at most one page more. Then
requests at one time that share a new prefix: it should be computed once. Counts are the server's own, from `usage`.
"""

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from uuid import uuid4

from rich.console import Console
from rich.progress import track
from rich.table import Table

from weir.bench.report import run_and_print
from weir.client import AsyncWeirClient, Chunk, GenerateOptions, Turn
from weir.core.errors import WeirError
from weir.kv.geometry import PAGE_TOKENS
from weir.model.errors import ModelError
from weir.model.files.source import resolve_model
from weir.model.tokens.chat_template import ChatTemplate, load_chat_template
from weir.model.tokens.tokenizer import Tokenizer, load_tokenizer

_FIRST_WORDS = 380
_SECOND_WORDS = 40
_SECOND_MAX_TOKENS = 8
_SUFFIX_TOKENS = 16
_SHARED_MAX_TOKENS = 4


@dataclass(frozen=True, slots=True)
class PrefixConfig:
    """`address` of a gateway's gRPC port, and `model`, which it serves."""

    address: str
    model: str
    num_chats: int
    answer_tokens: int
    num_sharing: int
    shared_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One request as its client saw it."""

    token_ids: tuple[int, ...]
    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    ttft_s: float

    @property
    def num_computed_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_cached_tokens


@dataclass(frozen=True, slots=True)
class ChatResult:
    """The second turn of one chat."""

    num_prompt_tokens: int
    num_new_tokens: int
    """Of its prompt, after what it has in common with the first turn and its answer."""
    is_retokenized: bool
    """The first answer's text became other tokens than the model had sampled."""
    num_computed_tokens: int
    ttft_s: float
    uncached_ttft_s: float
    has_same_tokens: bool
    """With the cache as without."""

    @property
    def num_excess_tokens(self) -> int:
        return self.num_computed_tokens - self.num_new_tokens


@dataclass(frozen=True, slots=True)
class SharedResult:
    """Requests at one time, `num_shared_tokens` of their prompts in common, `num_own_tokens` not."""

    num_requests: int
    num_shared_tokens: int
    num_own_tokens: int
    num_computed_tokens: int
    last_ttft_s: float
    uncached_last_ttft_s: float

    @property
    def times_shared_computed(self) -> float:
        return (self.num_computed_tokens - self.num_requests * self.num_own_tokens) / self.num_shared_tokens


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """What `weir bench prefix` measured."""

    chats: tuple[ChatResult, ...]
    shared: SharedResult


def main(config: PrefixConfig, *, as_json: bool) -> int:
    """Prints a table, or JSON. Returns the exit code: 1 if the stack cannot be measured."""
    return run_and_print(
        "weir bench prefix",
        lambda: asyncio.run(measure(config)),
        as_dict=asdict,
        tables=lambda report: [_table(report)],
        json_output=as_json,
        errors=(WeirError, ModelError),
    )


async def measure(config: PrefixConfig) -> PrefixReport:
    """Raises WeirError, or ModelError for a model whose files are not here."""
    source = resolve_model(config.model)
    tokenizer, template = load_tokenizer(source), load_chat_template(source)
    generator = random.Random(config.seed)
    async with AsyncWeirClient(config.address) as client:
        chats = []
        for _ in track(range(config.num_chats), "chats", console=Console(stderr=True)):
            chats.append(await _chat(client, config, generator, tokenizer, template))
        shared = await _share(client, config, generator, tokenizer.vocab_size)
    return PrefixReport(tuple(chats), shared)


async def _chat(
    client: AsyncWeirClient,
    config: PrefixConfig,
    generator: random.Random,
    tokenizer: Tokenizer,
    template: ChatTemplate,
) -> ChatResult:
    turns = [Turn("user", f"{uuid4().hex}: continue. {_words(generator, _FIRST_WORDS)}")]
    first = await _answer_chat(client, turns, _options(config, config.answer_tokens))
    before = [*_render(tokenizer, template, turns), *first.token_ids]
    turns += [Turn("assistant", first.text), Turn("user", _words(generator, _SECOND_WORDS))]
    prompt = _render(tokenizer, template, turns)
    num_common = next((i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), len(before))
    hit = await _answer_chat(client, turns, _options(config, _SECOND_MAX_TOKENS))
    miss = await _answer_chat(client, turns, _options(config, _SECOND_MAX_TOKENS, is_cached=False))
    return ChatResult(
        num_prompt_tokens=hit.num_prompt_tokens,
        num_new_tokens=len(prompt) - num_common,
        is_retokenized=num_common < len(before),
        num_computed_tokens=hit.num_computed_tokens,
        ttft_s=hit.ttft_s,
        uncached_ttft_s=miss.ttft_s,
        has_same_tokens=hit.token_ids == miss.token_ids,
    )


async def _share(
    client: AsyncWeirClient, config: PrefixConfig, generator: random.Random, vocab_size: int
) -> SharedResult:
    def draw(num_tokens: int) -> list[int]:
        return [generator.randrange(1000, vocab_size) for _ in range(num_tokens)]

    shared = draw(config.shared_tokens)
    prompts = [shared + draw(_SUFFIX_TOKENS) for _ in range(config.num_sharing)]
    uncached = _options(config, _SHARED_MAX_TOKENS, is_cached=False)
    misses = await asyncio.gather(*(_answer(client, prompt, uncached) for prompt in prompts))
    cached = _options(config, _SHARED_MAX_TOKENS)
    hits = await asyncio.gather(*(_answer(client, prompt, cached) for prompt in prompts))
    return SharedResult(
        num_requests=len(prompts),
        num_shared_tokens=config.shared_tokens,
        num_own_tokens=_SUFFIX_TOKENS,
        num_computed_tokens=sum(hit.num_computed_tokens for hit in hits),
        last_ttft_s=max(hit.ttft_s for hit in hits),
        uncached_last_ttft_s=max(miss.ttft_s for miss in misses),
    )


def _options(config: PrefixConfig, max_tokens: int, *, is_cached: bool = True) -> GenerateOptions:
    return GenerateOptions(model=config.model, temperature=0.0, max_tokens=max_tokens, skips_prefix_cache=not is_cached)


async def _answer_chat(client: AsyncWeirClient, turns: Sequence[Turn], options: GenerateOptions) -> TimedAnswer:
    return await _read(client.chat(turns, options))


async def _answer(client: AsyncWeirClient, prompt: Sequence[int], options: GenerateOptions) -> TimedAnswer:
    return await _read(client.generate(prompt, options))


async def _read(chunks: AsyncIterator[Chunk]) -> TimedAnswer:
    started_s = time.perf_counter()
    ttft_s, text, last = 0.0, "", None
    token_ids: list[int] = []
    async for chunk in chunks:
        if not token_ids and chunk.token_ids:
            ttft_s = time.perf_counter() - started_s
        token_ids += chunk.token_ids
        text += chunk.text
        last = chunk
    assert last is not None, "an answer has a last chunk"
    return TimedAnswer(tuple(token_ids), text, last.num_prompt_tokens, last.num_cached_tokens, ttft_s)


def _render(tokenizer: Tokenizer, template: ChatTemplate, turns: Sequence[Turn]) -> list[int]:
    """As the gateway does it."""
    text = template.render([{"role": turn.role, "content": turn.content} for turn in turns])
    return tokenizer.encode(text, add_bos=False, field="messages")


def _words(generator: random.Random, num_words: int) -> str:
    return " ".join(generator.choices(_TEXT.split(), k=num_words))


_TEXT = """
the river stone bridge runs over water fish swims below light falls on green leaves birds call each other morning comes
slow people walk to market buy bread apples cheese talk about weather war prices children laugh dog barks old man sits
bench reads paper smoke rises from chimney cold wind turns north snow may follow night winter long stories told by fire
"""


def _table(report: PrefixReport) -> Table:
    table = Table(title="weir bench prefix")
    table.add_column("measured")
    table.add_column("value", justify="right")
    chats, shared = report.chats, report.shared
    if chats:
        num_good = sum(chat.num_excess_tokens <= PAGE_TOKENS for chat in chats)
        ratio = statistics.median(chat.ttft_s / chat.uncached_ttft_s for chat in chats)
        table.add_row("second turns: prompt tokens, median", f"{_median(chats, 'num_prompt_tokens'):.0f}")
        table.add_row("… new tokens, median", f"{_median(chats, 'num_new_tokens'):.0f}")
        table.add_row("… computed tokens, median", f"{_median(chats, 'num_computed_tokens'):.0f}")
        table.add_row("… computed new tokens and at most a page", f"{num_good} of {len(chats)}")
        table.add_row("… re-tokenized to other tokens", f"{sum(chat.is_retokenized for chat in chats)} of {len(chats)}")
        table.add_row(
            "… same tokens as without cache", f"{sum(chat.has_same_tokens for chat in chats)} of {len(chats)}"
        )
        table.add_row("… TTFT, median", f"{_median(chats, 'ttft_s') * 1000:.0f} ms")
        table.add_row("… TTFT without cache, median", f"{_median(chats, 'uncached_ttft_s') * 1000:.0f} ms")
        table.add_row("… TTFT ratio, median", f"{ratio:.2f}")
    name = f"{shared.num_requests} requests, {shared.num_shared_tokens} shared tokens"
    table.add_row(f"{name}: prefix computed", f"{shared.times_shared_computed:.2f} times")
    table.add_row("… last first token", f"{shared.last_ttft_s:.2f} s")
    table.add_row("… last first token without cache", f"{shared.uncached_last_ttft_s:.2f} s")
    return table


def _median(chats: Sequence[ChatResult], name: str) -> float:
    return float(statistics.median(getattr(chat, name) for chat in chats))
