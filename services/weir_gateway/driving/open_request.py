"""What a frontend holds of a request: its choices (n for each of its prompts), each a request of its own to scheduler
and workers, as one stream of output."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace

from weir.core.clock import Clock
from weir.core.errors import WeirError
from weir_gateway.answers.formats import MISTRAL_LIST
from weir_gateway.driving.output_pace import OutputPace
from weir_gateway.driving.request_span import RequestSpan
from weir_gateway.requests.output import OutputDelta
from weir_gateway.requests.request_end import RequestEnd
from weir_gateway.requests.request_state import RequestState
from weir_gateway.requests.validation import CheckedRequest
from weir_gateway.tools.call_ids import CallIds


class OpenRequest:
    """Leaving the context without having taken everything cancels it.

    Choices are admitted together or not at all: nothing is handed out before each is queued, or has ended with what
    there was at its deadline, and the first error ends all. Their states share one `has_output`.
    """

    def __init__(self, states: Sequence[RequestState], span: RequestSpan, clock: Clock, pace: OutputPace) -> None:
        self.states = tuple(states)
        """By prompt, and n of each; the first of a prompt is what a request of it alone with n = 1 would be."""
        self._span = span
        self._clock = clock
        self._pace = pace
        self._num_since_hold = 0
        """Deltas handed out since tokens were last let gather, from the first one with text on: each choice is to have
        its turn before they are again."""
        self._has_output = states[0].has_output
        self._gathering: asyncio.Future[None] | None = None
        """While tokens gather: it is to end with the request."""
        self._unfinished = dict(enumerate(self.states))
        """Choices whose last delta was not handed out; the one that was served longest ago comes first."""
        self._are_admitted = False
        """Whether each is queued, or has ended with what there was: once so, always so."""
        self._error: WeirError | None = None
        self.ended: asyncio.Future[RequestEnd] = asyncio.get_running_loop().create_future()
        """All have ended: the first error's ending, or that of choice 0."""
        for state in self.states:
            state.ended.add_done_callback(self._on_end)

    @property
    def request_id(self) -> str:
        return self.states[0].request_id

    @property
    def client_id(self) -> str:
        """What the client calls it by."""
        return self.checked.client_request.options.request_id or self.request_id

    @property
    def checked(self) -> CheckedRequest:
        return self.states[0].checked

    @property
    def num_answers(self) -> int:
        """Of each prompt."""
        return self.checked.client_request.options.n or 1

    @property
    def by_prompt(self) -> list[tuple[RequestState, ...]]:
        """The answers to each prompt."""
        return [self.states[first : first + self.num_answers] for first in range(0, len(self.states), self.num_answers)]

    @property
    def num_prompt_tokens(self) -> int:
        """Summed over all prompts."""
        return sum(len(answers[0].checked.prompt_token_ids) for answers in self.by_prompt)

    @property
    def num_output_tokens(self) -> int:
        """Summed over all choices."""
        return sum(state.output.num_tokens for state in self.states)

    @property
    def num_reasoning_tokens(self) -> int:
        """Of these, those with which the model reasoned."""
        return sum(state.output.num_reasoning_tokens for state in self.states)

    @property
    def num_cached_tokens(self) -> int:
        """Found in the prefix cache, summed over all prompts: of each by the choice that found most, for whose pages
        the others wait."""
        return sum(max(state.num_cached_tokens for state in answers) for answers in self.by_prompt)

    def call_ids(self) -> list[CallIds]:
        """Names of calls of tools, by choice."""
        tools = self.checked.model.answer_format.tools
        is_short = tools is not None and tools.name == MISTRAL_LIST.name
        return [CallIds(self.request_id, choice, is_short) for choice in range(len(self.states))]

    async def next_delta(self) -> OutputDelta:
        """Waits for something to send, and for more of it while the event loop is behind. Raises the first error, after
        everything before it was handed out.

        Nothing is handed out if one choice was not admitted.
        """
        if self._num_since_hold >= len(self._unfinished) and self._pace.hold_s:
            self._num_since_hold = 0
            await self._gather()
        while (delta := self._try_next()) is None:
            self._has_output.clear()
            await self._has_output.wait()
        self._num_since_hold += bool(self._num_since_hold or delta.text or delta.finish_reason)
        self._pace.on_wake()
        return delta

    def mark_sent(self) -> None:
        """To be called when a delta was sent to the client: the first one is in the trace."""
        if self._span.needs_first_chunk:
            self._span.first_chunk(self._clock.now_s())

    def cancel(self, message: str) -> None:
        for state in self.states:
            state.cancel(message)

    def leave(self) -> None:
        """The client is gone, or has everything."""
        self.cancel("the client went away")
        for state in self.states:
            state.released.set()

    def __enter__(self) -> "OpenRequest":
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    async def _gather(self) -> None:
        if self.ended.done():
            return
        self._gathering = self._pace.gather()
        try:
            await self._gathering
        finally:
            self._gathering = None

    def _try_next(self) -> OutputDelta | None:
        if not self._are_admitted:
            self._are_admitted = all(state.is_admitted or state.output.finish_reason for state in self.states)
        if self._are_admitted:
            for choice, state in list(self._unfinished.items()):
                delta = state.output.try_take()
                if delta is not None:
                    return self._hand_out(choice, delta)
        if self._error is not None:
            raise self._error
        return None

    def _hand_out(self, choice: int, delta: OutputDelta) -> OutputDelta:
        state = self._unfinished.pop(choice)
        if delta.finish_reason is None:
            self._unfinished[choice] = state
        delta.choice = choice
        delta.is_last = not self._unfinished
        return delta

    def _on_end(self, ended: "asyncio.Future[RequestEnd]") -> None:
        ending = ended.result()
        if ending.error is not None and self._error is None:
            self._error = ending.error
            self.cancel("another answer to the same request has failed")
        if all(state.ended.done() for state in self.states) and not self.ended.done():
            endings = [state.ended.result() for state in self.states]
            first = next((ending for ending in endings if ending.error is self._error), endings[0])
            self.ended.set_result(first)
            if self._gathering is not None and not self._gathering.done():
                self._gathering.set_result(None)
        self._has_output.set()


def choice_of(checked: CheckedRequest, index: int) -> CheckedRequest:
    """Choice 0 is the request as it is; each other one samples with a seed made of the request's own."""
    if index == 0:
        return checked
    sampling = replace(checked.sampling, seed=_seed_of(checked.sampling.seed, index), prompt_logprobs=None)
    return replace(checked, sampling=sampling)


def request_id_of(request_id: str, index: int) -> str:
    """Those of one request differ in their last four digits only."""
    return f"{request_id[:-4]}{int(request_id[-4:], 16) ^ index:04x}"


def _seed_of(seed: int, index: int) -> int:
    packed = seed.to_bytes(8, "big") + index.to_bytes(2, "big")
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest())
