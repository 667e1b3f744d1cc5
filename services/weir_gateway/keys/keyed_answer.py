"""One connection's view of a keyed request: from the token that its client wants until it leaves, or is replaced."""

from collections.abc import Callable

from weir.core.errors import Cancelled, WeirError
from weir_gateway.driving.open_request import OpenRequest
from weir_gateway.keys.claims import KeyedBody, beyond_end
from weir_gateway.requests.output import OutputDelta


class KeyedAnswer(OpenRequest):
    """Leaving it does not cancel the request: that is for whoever keeps it to decide."""

    def __init__(self, running: OpenRequest, body: KeyedBody, on_leave: Callable[["KeyedAnswer"], None]) -> None:
        super().__init__(running.states, running._span, running._clock, running._pace)
        self._body = body
        self._on_leave = on_leave
        self._has_left = False
        self._ousted_by: WeirError | None = None
        for state in self.states:
            state.output.rewind(body.resume_from or 0)

    def oust(self, error: WeirError) -> None:
        """Another connection has the output from here on, or nobody; this one's client gets the first such error."""
        self._ousted_by = self._ousted_by or error
        self._has_output.set()

    async def next_delta(self) -> OutputDelta:
        delta = await super().next_delta()
        output = self.states[delta.choice].output
        if output.ends_early:
            raise beyond_end(self._body, output.num_tokens)
        return delta

    def leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            # Whoever waits here may not know that its client is gone, and must take nothing from the next connection.
            self.oust(Cancelled("the client went away"))
            self._on_leave(self)

    def _try_next(self) -> OutputDelta | None:
        if self._ousted_by is not None:
            raise self._ousted_by
        return super()._try_next()
