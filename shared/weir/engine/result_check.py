"""Whether a runner did what a step's plan asks for; nothing of a result is used before."""

from weir.engine.plan import ChunkPlan, StepPlan, StepResult


class StepDefect(Exception):
    """What the runner returned is not what the plan asked for."""


def check_result(plan: StepPlan, result: StepResult, vocab_size: int) -> None:
    """Raises StepDefect, naming the slot, for what is missing or is no token."""
    token_ids = result.token_ids
    for chunk in plan.chunks:
        sample = chunk.sample
        if sample is not None and sample.params.logprobs is None and chunk.score is None:
            # Most chunks: a short way for them.
            token_id = token_ids.get(chunk.slot)
            if token_id is not None and 0 <= token_id < vocab_size:
                continue
        problem = _try_find_problem(chunk, result, vocab_size)
        if problem is not None:
            raise StepDefect(f"slot {chunk.slot}: {problem}")


def _try_find_problem(chunk: ChunkPlan, result: StepResult, vocab_size: int) -> str | None:
    if chunk.score is not None:
        num_scored, num_wanted = len(result.prompt_logprobs.get(chunk.slot, ())), len(chunk.score.next_token_ids)
        if num_scored != num_wanted:
            return f"{num_scored} of {num_wanted} tokens of the prompt were scored"
    if chunk.sample is None:
        return None
    token_id = result.token_ids.get(chunk.slot)
    if token_id is None or not 0 <= token_id < vocab_size:
        return f"drew {token_id}, the vocabulary has {vocab_size}"
    if chunk.sample.params.logprobs is not None and chunk.slot not in result.logprobs:
        return "the drawn token has no log-probability"
    return None
