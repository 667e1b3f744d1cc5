"""What models write: ids to text piece by piece, stop strings, reasoning and calls of tools. However it is cut, the
same comes of it, nothing raises, and work is linear."""

import contextlib
import itertools
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.fuzz.choices import Choices
from tests.fuzz.target import Check, Target, simple
from tests.fuzz.valid_files import gguf_bytes
from tests.unit.gateway.answers.corpus import new_parser
from tests.unit.gateway.answers.test_parser import FRAGMENTS, parse
from weir.model.files.source import ModelKind, ModelSource
from weir.model.tokens.tokenizer import load_tokenizer
from weir_gateway.answers.formats import THINK, TOOL_FORMATS, AnswerFormat
from weir_gateway.requests.stop_strings import StopMatcher

_NEST = 20_000
_FORMATS = [AnswerFormat(reasoning, tools) for reasoning in (None, THINK) for tools in (None, *TOOL_FORMATS.values())]


def _cut(choices: Choices, whole: Sequence[str] | str) -> Iterable[str]:
    ends = sorted(choices.below(len(whole) + 1) for _ in range(choices.below(8)))
    return ["".join(whole[start:end]) for start, end in itertools.pairwise((0, *ends, len(whole)))]


def _answer(choices: Choices) -> str:
    parts: list[str] = []
    while not choices.is_over and len(parts) < 200:
        kind = choices.byte()
        if kind < 200:
            parts.append(FRAGMENTS[kind % len(FRAGMENTS)])
        elif kind < 230:
            parts.append(choices.text(16))
        else:
            nest = choices.below(_NEST)
            parts.append(choices.pick(("[", '{"a":', "<parameter=a>", "<think>", '"\\', "\n")) * nest)
    return "".join(parts)


def check_answer(data: bytes) -> None:
    choices = Choices(data)
    answer_format = choices.pick(_FORMATS)
    starts_in_reasoning = bool(choices.below(2)) and answer_format.reasoning is not None
    cuts = Choices(choices.some_bytes(16))
    text = _answer(choices)
    events = [
        parse(new_parser(answer_format, starts_in_reasoning=starts_in_reasoning), parts)
        for parts in ([text], _cut(cuts, text))
    ]
    assert events[0] == events[1], "cuts change what comes of it"


def check_stops(data: bytes) -> None:
    choices = Choices(data)
    stops = [choices.text(8) or "x" for _ in range(choices.below(4) + 1)]
    text = "".join(choices.pick((*stops, choices.text(4))) for _ in range(choices.below(20)))
    is_included = bool(choices.below(2))
    found = [_until_stop(StopMatcher(stops, is_included=is_included), parts) for parts in ([text], _cut(choices, text))]
    assert found[0] == found[1], "cuts change where it stops"


def _until_stop(matcher: StopMatcher, parts: Iterable[str]) -> tuple[str, str | None]:
    said = ""
    for part in parts:
        result = matcher.push(part)
        said += result.text
        if result.matched is not None:
            return said, result.matched
    return said + matcher.finish(), None


@contextlib.contextmanager
def _detokenizer() -> Iterator[Check]:
    """Of the smallest vocabulary of bytes, and of one with a fallback to bytes."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizers = []
        for kind in ("gpt2", "llama"):
            path = Path(folder) / kind
            path.write_bytes(gguf_bytes(kind))
            tokenizers.append(load_tokenizer(ModelSource("m", path, ModelKind.GGUF)))

        def check(data: bytes) -> None:
            choices = Choices(data)
            tokenizer = choices.pick(tokenizers)
            skips, num_cuts = bool(choices.below(2)), choices.below(6)
            cuts = [choices.byte() for _ in range(num_cuts)]
            token_ids = [byte if byte < 250 else byte + choices.below(1 << 32) for byte in choices.rest()]
            ends = (0, *sorted(cut % (len(token_ids) + 1) for cut in cuts), len(token_ids))
            pieces = tokenizer.detokenizer(skip_special=skips)
            text = "".join(pieces.push(token_ids[start:end]) for start, end in itertools.pairwise(ends))
            assert text + pieces.finish() == tokenizer.decode(token_ids, skip_special=skips)

        yield check


TARGETS = (
    Target("answers", simple(check_answer), (), max_bytes=512, ci_examples=300),
    Target("detokenizer", _detokenizer, (), max_bytes=256, ci_examples=200),
    Target("stop_strings", simple(check_stops), (), max_bytes=256, ci_examples=300),
)
