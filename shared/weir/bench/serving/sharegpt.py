"""ShareGPT as a load: its conversations, or a table of nothing but their lengths."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weir.bench.serving.jobs import random_prompts
from weir.bench.serving.records import BenchRequest
from weir.sim.workloads.trace_file import TraceError, is_csv, open_text
from weir.sim.workloads.traces import read_lengths

_CHARS_A_TOKEN = 4
_MIN_TOKENS = 4
_MAX_PROMPT_TOKENS = 1024
_MAX_TOTAL_TOKENS = 2048
"""What vLLM's benchmark leaves out, so that figures of both are of the same conversations."""


@dataclass(frozen=True, slots=True)
class ShareGpt:
    """`path`: the JSON of conversations, whose first turns are sent as they are, or a CSV of lengths (`read_lengths`).

    `output_len` 0: as long as the answer in the file, which without its tokenizer is counted at 4 characters a token.
    """

    path: Path
    output_len: int = 0
    prompt_scale: float = 1.0
    output_scale: float = 1.0
    has_times = False
    is_of_chats = False

    def requests(self, num: int, seed: int) -> list[BenchRequest]:
        """A drawn choice without repeats. Raises TraceError."""
        if is_csv(self.path):
            return self._of_lengths(num, seed)
        found = list(self._of_conversations())
        if not found:
            raise TraceError(self.path, 0, "", "has no conversation of a length that is measured")
        random.Random(seed).shuffle(found)
        return found[:num]

    def _of_lengths(self, num: int, seed: int) -> list[BenchRequest]:
        lengths = read_lengths(self.path)
        random.Random(seed).shuffle(lengths)
        return [
            BenchRequest(
                random_prompts(1, max(1, round(one.num_prompt_tokens / self.prompt_scale)), seed + index)[0],
                self.output_len or max(1, round(one.num_output_tokens / self.output_scale)),
            )
            for index, one in enumerate(lengths[:num])
        ]

    def _of_conversations(self) -> Iterator[BenchRequest]:
        for index, entry in enumerate(_entries(self.path)):
            turns = entry.get("conversations") if isinstance(entry, dict) else None
            if not isinstance(turns, list):
                raise TraceError(self.path, 0, "conversations", f"of entry {index} is not a list")
            values = [turn.get("value") for turn in turns[:2] if isinstance(turn, dict)]
            texts = [value for value in values if isinstance(value, str)]
            if len(texts) < 2:
                continue
            num_prompt, num_answer = (-(-len(text) // _CHARS_A_TOKEN) for text in texts)
            output_len = self.output_len or num_answer
            if num_prompt < _MIN_TOKENS or (not self.output_len and num_answer < _MIN_TOKENS):
                continue
            if num_prompt <= _MAX_PROMPT_TOKENS and num_prompt + output_len <= _MAX_TOTAL_TOKENS:
                yield BenchRequest(texts[0], output_len)


def _entries(path: Path) -> list[object]:
    try:
        with open_text(path) as file:
            entries = json.load(file)
    except (OSError, EOFError, ValueError) as error:
        raise TraceError(path, 0, "", f"cannot be read: {error}") from error
    if not isinstance(entries, list):
        raise TraceError(path, 0, "", "is not a list of conversations")
    return entries
