"""What is counted once a prompt, however many answers it has."""

from collections.abc import Sequence

from weir_gateway.requests.request_figures import LaneFigures
from weir_gateway.requests.request_state import RequestState


def count_prompt(figures: LaneFigures, answers: Sequence[RequestState], *, is_finished: bool) -> None:
    """`answers`: all to one prompt, which have ended. `is_finished`: the request that they are of has, as it should."""
    begun = [answer for answer in answers if answer.output.num_tokens]
    if begun:
        figures.num_prompt_tokens += len(answers[0].checked.prompt_token_ids)
        # What the first one computes is cached for the others: it was not before.
        figures.num_cached_tokens += min(answer.num_cached_tokens for answer in begun)
    if is_finished:
        figures.num_choices.observe(len(answers))
        figures.longest_output_tokens.observe(max(answer.output.num_tokens for answer in answers))
        figures.max_tokens.observe(answers[0].checked.stop_rules.max_tokens, len(answers))
