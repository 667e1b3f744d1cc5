"""The answer that is not streamed, of a request over HTTP or a line of a batch."""

import asyncio
from collections.abc import Callable

from weir.core.sampling import SamplingParams
from weir_gateway.driving.open_request import OpenRequest
from weir_gateway.frontends.json_parts import MAX_INLINE_ENTRIES, dump_in_parts
from weir_gateway.frontends.openai.render import AnswerRenderer
from weir_gateway.requests.output import OutputDelta, joined


async def whole_answer(opened: OpenRequest, renderer: AnswerRenderer) -> bytes:
    """JSON. Raises WeirError."""
    deltas: list[list[OutputDelta]] = [[] for _ in opened.states]
    while True:
        delta = await opened.next_delta()
        deltas[delta.choice].append(delta)
        if delta.is_last:
            break
    opened.leave()

    def render() -> bytes:
        return dump_in_parts(renderer.whole([joined(choice) for choice in deltas])).encode()

    num_entries = sum(len(delta.logprobs) + len(delta.prompt_logprobs) for choice in deltas for delta in choice)
    num_entries *= 1 + _num_top(opened.checked.sampling)
    return await rendered(render, num_entries + renderer.num_prompt_ids + renderer.num_output_ids)


async def rendered(render: Callable[[], bytes], num_entries: int) -> bytes:
    """In a thread where it is long."""
    return render() if num_entries <= MAX_INLINE_ENTRIES else await asyncio.to_thread(render)


def _num_top(sampling: SamplingParams) -> int:
    return max(sampling.logprobs or 0, sampling.prompt_logprobs or 0)
