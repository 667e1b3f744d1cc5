"""The n answers to one request: each a request of its own to scheduler and workers, all one stream to the client."""

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from weir.core.errors import WeirError
from weir.core.life import FinishReason
from weir_gateway.driving.call import RequestState
from weir_gateway.requests.output import OutputPiece
from weir_gateway.requests.request import RequestEnd
from weir_gateway.requests.validation import CheckedRequest

logger = logging.getLogger(__name__)


class OutputDelta(NamedTuple):
    """What the client gets next. `finish_reason` is set in the last one of a choice, `is_last` in the last of all."""

    piece: OutputPiece
    finish_reason: FinishReason | None
    choice: int
    is_last: bool


class Choices:
    """Admitted together or not at all: nothing is handed out before each is queued, and the first error ends all.

    Every call sets `has_output`, which they share, when it has some.
    """

    def __init__(self, calls: Sequence[RequestState], has_output: asyncio.Event) -> None:
        self.calls = tuple(calls)
        self._has_output = has_output
        self._open = dict(enumerate(self.calls))
        """Those whose last piece was not handed out; the one that was heard longest ago comes first."""
        self._error: WeirError | None = None
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[RequestEnd] = loop.create_future()
        """All have ended: the first error's ending, or that of choice 0."""
        for call in self.calls:
            call.ended.add_done_callback(self._on_end)

    @property
    def num_output_tokens(self) -> int:
        return sum(call.output.num_tokens for call in self.calls)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt, found in the prefix cache by the choice that found most: the others wait for its pages."""
        return max(call.num_cached_tokens for call in self.calls)

    def cancel(self, message: str) -> None:
        for call in self.calls:
            call.cancel(message)

    def release(self) -> None:
        """The reader is gone."""
        for call in self.calls:
            call.released.set()

    async def next_piece(self) -> OutputDelta:
        """Waits for something to send. Raises the first error, after everything before it was handed out.

        Nothing is handed out if one of them was not admitted.
        """
        while (delivery := self._try_next()) is None:
            self._has_output.clear()
            await self._has_output.wait()
        return delivery

    def _try_next(self) -> OutputDelta | None:
        if all(call.request.is_admitted for call in self.calls):
            for choice, call in list(self._open.items()):
                taken = call.try_take()
                if taken is not None:
                    return self._delivery(choice, *taken)
        if self._error is not None:
            raise self._error
        return None

    def _delivery(self, choice: int, piece: OutputPiece, finish_reason: FinishReason | None) -> OutputDelta:
        call = self._open.pop(choice)
        if finish_reason is None:
            self._open[choice] = call
        return OutputDelta(piece, finish_reason, choice, is_last=not self._open)

    def _on_end(self, ended: "asyncio.Future[RequestEnd]") -> None:
        ending = ended.result()
        if ending.error is not None and self._error is None:
            self._error = ending.error
            for call in self.calls:
                call.cancel("another answer to the same request has failed")
        if all(call.ended.done() for call in self.calls) and not self.ended.done():
            endings = [call.ended.result() for call in self.calls]
            first = next((ending for ending in endings if ending.error is self._error), endings[0])
            self.ended.set_result(first)
        self._has_output.set()


def choice_of(checked: CheckedRequest, index: int) -> CheckedRequest:
    """Choice 0 is what a request with n = 1 would be; each other one draws with a seed made of the request's own."""
    if index == 0:
        return checked
    sampling = replace(checked.sampling, seed=_seed_of(checked.sampling.seed, index), prompt_logprobs=None)
    return replace(checked, sampling=sampling)


def request_id_of(request_id: str, index: int) -> str:
    """Those of one request differ in their last two digits only."""
    return f"{request_id[:-2]}{int(request_id[-2:], 16) ^ index:02x}"


def _seed_of(seed: int, index: int) -> int:
    packed = seed.to_bytes(8, "big") + index.to_bytes(2, "big")
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest())
