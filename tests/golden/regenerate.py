"""Makes smollm2-135m.json: prompts, their ids, and 64 greedy tokens of each by Hugging Face transformers in fp32.

    WEIR_TEST_DATA=… .venv/bin/python tests/golden/regenerate.py

`WEIR_TEST_DATA` is a folder with traces/humaneval.jsonl.gz and traces/gsm8k_train.jsonl.gz. Run it when the model file
or the choice of prompts changes, and never to make a failing test pass: the expected ids come from another program.
"""

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import tokenizers
import torch
import transformers

from weir.model.files.catalog import SMOLLM2_135M
from weir.model.files.source import ModelSource, resolve_model

TARGET = Path(__file__).parent / "smollm2-135m.json"
NUM_PROMPTS = 64
SHORTEST, LONGEST = 5, 900
NUM_NEW_TOKENS = 64


@dataclass(frozen=True)
class GoldenPrompt:
    """`smallest_margin` is the least distance of the two greatest logits over the new tokens."""

    origin: str
    text: str
    prompt_ids: list[int]
    expected_ids: list[int]
    smallest_margin: float


def main() -> None:
    torch.set_num_threads(1)
    source = resolve_model(SMOLLM2_135M.name)
    tokenizer = reference_tokenizer(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.path.parent, gguf_file=source.path.name, dtype=torch.float32
    )
    model.eval()
    prompts = []
    for origin, text in choose_prompts(tokenizer, Path(os.environ["WEIR_TEST_DATA"]) / "traces"):
        prompt_ids = tokenizer.encode(text).ids
        expected_ids, margin = generate(model, prompt_ids)
        prompts.append(GoldenPrompt(origin, text, prompt_ids, expected_ids, margin))
        print(
            f"{len(prompts)}/{NUM_PROMPTS} {origin}: {len(prompt_ids)} tokens, smallest margin {margin:.4f}", flush=True
        )
    write(prompts)


def reference_tokenizer(source: ModelSource) -> tokenizers.Tokenizer:
    """What transformers reads from the file, with the one part it leaves out there: SmolLM splits digits first."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    backend = tokenizer.backend_tokenizer
    assert isinstance(backend, tokenizers.Tokenizer)
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [digits, tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend


def choose_prompts(tokenizer: tokenizers.Tokenizer, traces: Path) -> Iterator[tuple[str, str]]:
    """Code and word problems in turn, of lengths that grow geometrically; every fourth is a chat."""
    problems = [
        f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in rows(traces / "gsm8k_train.jsonl.gz")
    ]
    programs = [row["prompt"] + row["canonical_solution"] + "\n\n" for row in rows(traces / "humaneval.jsonl.gz")]
    for number in range(NUM_PROMPTS):
        num_tokens = round(SHORTEST * (LONGEST / SHORTEST) ** (number / (NUM_PROMPTS - 1)))
        name, texts = ("gsm8k", problems) if number % 2 else ("humaneval", programs)
        first = number * 2
        text = cut(tokenizer, "".join(texts[first : first + 20]), num_tokens)
        origin = f"{name} from row {first}"
        if number % 4 == 3 and number > NUM_PROMPTS // 2:
            text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
            origin += ", as a chat"
            text = cut_chat(tokenizer, text, num_tokens)
        yield origin, text


def cut(tokenizer: tokenizers.Tokenizer, text: str, num_tokens: int) -> str:
    return tokenizer.decode(tokenizer.encode(text).ids[:num_tokens], skip_special_tokens=False)


def cut_chat(tokenizer: tokenizers.Tokenizer, chat: str, num_tokens: int) -> str:
    """Shortens the user's words until the whole is `num_tokens` long."""
    ids = tokenizer.encode(chat).ids
    end_of_message = tokenizer.token_to_id("<|im_end|>")
    assert end_of_message is not None
    tail = ids.index(end_of_message)
    shortened = ids[: tail - max(0, len(ids) - num_tokens)] + ids[tail:]
    return tokenizer.decode(shortened, skip_special_tokens=False)


def rows(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt") as lines:
        yield from map(json.loads, lines)


def generate(model: torch.nn.Module, prompt_ids: list[int]) -> tuple[list[int], float]:
    """Greedy, past the end-of-sequence token. Not `model.generate`: that hides the logits it decides by."""
    expected_ids: list[int] = []
    smallest_margin = float("inf")
    cache = None
    fresh = prompt_ids
    with torch.inference_mode():
        while len(expected_ids) < NUM_NEW_TOKENS:
            output = model(input_ids=torch.tensor([fresh]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            (best, second), (token_id, _) = (part.tolist() for part in output.logits[0, -1].topk(2))
            smallest_margin = min(smallest_margin, best - second)
            expected_ids.append(token_id)
            fresh = [token_id]
    return expected_ids, smallest_margin


def write(prompts: list[GoldenPrompt]) -> None:
    header = {
        "model": SMOLLM2_135M.name,
        "file_sha256": SMOLLM2_135M.file_sha256,
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, fp32, 1 thread",
        "prompts_from": "humaneval and gsm8k, MIT: see NOTICE.md",
    }
    lines = ",\n".join(json.dumps(asdict(prompt), ensure_ascii=True) for prompt in prompts)
    TARGET.write_text(json.dumps(header, indent=1)[:-2] + f',\n "prompts": [\n{lines}\n]}}\n')
    print(f"wrote {TARGET}: {TARGET.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
