"""A prefill and a decode process on one GPU, end to end: `python -m benchmarks.gpu.cuda_pair`.

First one request at a time, whose tokens must be those of one process alone (the products of one row and of one prompt
are the same then); then many at once, for the figures.
"""

import argparse
import json
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.model import CudaKind, prefill_and_decode
from benchmarks.gpu.pair import PairLoad, PairResult, run_pair
from weir.model.triton.batch import TritonLimits

_LIMITS = TritonLimits(max_rows=1024, max_sequences=64, max_context_tokens=4096)
_NUM_PAGES = 8192
_NUM_OUTPUT_TOKENS = 64
_CHUNK_TOKENS = 512


def main() -> int:
    """0 if the tokens of single requests agree and every page came back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-shape", default="llama-3.2-1b")
    parser.add_argument("--num-requests", type=int, default=48)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    kind = CudaKind(arguments.model_shape, _LIMITS)
    prompts = _prompts(arguments.num_requests, kind.vocab_size)

    alone = PairLoad(prompts[:4], _NUM_OUTPUT_TOKENS, _NUM_PAGES, _CHUNK_TOKENS, max_running=1)
    found = run_pair(kind, alone)
    expected = _one_process(kind, alone)
    num_equal = sum(found.token_ids[number] == token_ids for number, token_ids in enumerate(expected))
    many = run_pair(kind, replace(alone, prompts=prompts, max_running=_LIMITS.max_sequences))

    figures = _figures(many) | {"single_requests": len(expected), "single_requests_equal": num_equal}
    for name, value in figures.items():
        print(f"{name:32} {value:.3f}" if isinstance(value, float) else f"{name:32} {value}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=2) + "\n")
    all_back = many.num_free_pages_at_end == found.num_free_pages_at_end == _NUM_PAGES
    return 0 if num_equal == len(expected) and all_back else 1


def _prompts(count: int, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    source = random.Random(0)
    return tuple(
        tuple(source.randrange(vocab_size) for _ in range(source.choice((100, 400, 900)))) for _ in range(count)
    )


def _one_process(kind: CudaKind, load: PairLoad) -> list[list[int]]:
    memory = kind.create_memory(load.num_pages * kind.page_bytes)
    try:
        runner, warm_up = kind.make_runner(memory, load.num_pages)
        warm_up()
        return [
            prefill_and_decode(runner, prompt, load.num_output_tokens, load.chunk_tokens) for prompt in load.prompts
        ]
    finally:
        memory.close()


def _figures(result: PairResult) -> dict[str, float | int]:
    num_tokens = sum(map(len, result.token_ids.values()))
    return {
        "requests": len(result.token_ids),
        "output_tokens": num_tokens,
        "output_tokens_a_second": num_tokens / result.duration_s,
        "first_token_median_ms": 1000 * statistics.median(result.first_token_s.values()),
        "hand_off_median_us": 1e6 * statistics.median(result.hand_off_s),
        "handed_off_pages": result.num_handed_off_pages,
        "free_pages_at_end": result.num_free_pages_at_end,
    }


if __name__ == "__main__":
    sys.exit(main())
