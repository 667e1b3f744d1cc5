"""A prefill and a decode process on one GPU, end to end: `python -m benchmarks.gpu.cuda_pair`.

First one request at a time, whose tokens must be those of one process alone (the products of one row and of one prompt
are the same then); then many at once, for the figures; and pages that nobody sampled from, read by another process as
soon as their step is done.
"""

import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from benchmarks.gpu.case_loop import CaseLoop
from benchmarks.gpu.model import CudaKind, prefill_and_decode
from benchmarks.gpu.output import Record
from benchmarks.gpu.pair import PairLoad, PairResult, run_pair
from benchmarks.gpu.shared_chunk import look_at_unsampled_chunks
from weir.model.triton.batch import TritonLimits

_MODEL_SHAPE = "llama-3.2-1b"
_LIMITS = TritonLimits(max_rows=1024, max_sequences=64, max_context_tokens=4096)
_NUM_PAGES = 8192
_NUM_REQUESTS = 48
_NUM_ALONE = 4
_NUM_OUTPUT_TOKENS = 64
_CHUNK_TOKENS = 512
_NUM_LOOKS = 20


def _prompts(count: int, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    source = random.Random(0)
    return tuple(
        tuple(source.randrange(vocab_size) for _ in range(source.choice((100, 400, 900)))) for _ in range(count)
    )


def _alone(kind: CudaKind, load: PairLoad) -> Iterator[Record]:
    found = run_pair(kind, load)
    expected = _one_process(kind, load)
    num_equal = sum(found.token_ids[number] == token_ids for number, token_ids in enumerate(expected))
    is_right = num_equal == len(expected) and found.num_free_pages_at_end == load.num_pages
    yield {
        "verdict": "ok" if is_right else "failed",
        "requests": len(expected),
        "equal_to_one_process": num_equal,
        "free_pages_at_end": found.num_free_pages_at_end,
        "pages": load.num_pages,
    }


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


def _many(kind: CudaKind, load: PairLoad) -> Iterator[Record]:
    result = run_pair(kind, load)
    yield {
        "verdict": "ok" if result.num_free_pages_at_end == load.num_pages else "failed",
        "requests": len(result.token_ids),
        "output_tokens_a_second": sum(map(len, result.token_ids.values())) / result.duration_s,
        "first_token_median_ms": 1000 * statistics.median(result.first_token_s),
        "hand_off_median_us": 1e6 * statistics.median(result.hand_off_s),
        "handed_off_pages": result.num_handed_off_pages,
        "free_pages_at_end": result.num_free_pages_at_end,
    }
    yield from inter_token_records(result)


def inter_token_records(result: PairResult) -> Iterator[Record]:
    """What prompts that are computed on the same GPU cost the answers."""
    for when, while_prefilling in (("while prompts are computed", True), ("after all prompts", False)):
        gaps_s = result.inter_token_s(while_prefilling=while_prefilling)
        if gaps_s:
            yield {
                "inter_token_times": when,
                "count": len(gaps_s),
                "median_ms": 1000 * statistics.median(gaps_s),
                "p99_ms": 1000 * _quantile(gaps_s, 0.99),
                "most_ms": 1000 * max(gaps_s),
            }


def _quantile(values: Sequence[float], share: float) -> float:
    """By nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> int:
    loop = CaseLoop.from_command_line("pair", __doc__)
    kind = CudaKind(_MODEL_SHAPE, _LIMITS)
    prompts = _prompts(_NUM_REQUESTS, kind.vocab_size)
    alone = PairLoad(prompts[:_NUM_ALONE], _NUM_OUTPUT_TOKENS, _NUM_PAGES, _CHUNK_TOKENS, max_running=1)
    many = replace(alone, prompts=prompts, max_running=_LIMITS.max_sequences)
    launched = replace(kind, uses_graphs=False)  # no decode is run: nothing is captured
    chunks = partial(look_at_unsampled_chunks, launched, _NUM_PAGES, _CHUNK_TOKENS, _NUM_LOOKS)
    loop.run("chunks without samples, read by another process", chunks)
    loop.run("one request at a time", partial(_alone, kind, alone))
    loop.run("many requests at once", partial(_many, kind, many))
    return loop.exit_code


if __name__ == "__main__":
    sys.exit(main())
