"""Numbers the dispatches of one request, and counts how many of them in a row came to nothing."""


class DispatchCount:
    """Of the present dispatch it is told whether workers were started, and whether they have brought a token."""

    def __init__(self) -> None:
        self.present = self._newest = self.num = 1
        """Rises with each. Whatever speaks of an earlier one comes too late. `num`: how many there were, the present
        one included, but for those by which it only moved."""
        self._num_fruitless_before = self._num_unreached_before = 0

    def begin_at(self, dispatch: int) -> None:
        """The first one, above all that a gateway which died may have used. Before the request is submitted."""
        self.present = self._newest = dispatch

    def take(self) -> int:
        """A number for a dispatch that may come to be: it is nobody else's."""
        self._newest += 1
        return self._newest

    def move_to(self, dispatch: int) -> None:
        """One that was taken begins: the request goes on elsewhere, and nothing was lost. Only what decodes moves, so
        that the present one was not in vain."""
        self.present = dispatch
        self._num_fruitless_before = self._num_unreached_before = 0

    def num_fruitless(self, *, is_started: bool, has_new_tokens: bool) -> int:
        """So many in a row, up to the present one, have reached workers and brought no token."""
        if not is_started:
            return self._num_fruitless_before
        return 0 if has_new_tokens else self._num_fruitless_before + 1

    def num_unreached(self, *, is_started: bool) -> int:
        """So many in a row, up to the present one, were granted workers that are gone: not this request's fault."""
        return 0 if is_started else self._num_unreached_before + 1

    def begin_next(self, *, is_started: bool, has_new_tokens: bool) -> None:
        self._num_fruitless_before = self.num_fruitless(is_started=is_started, has_new_tokens=has_new_tokens)
        self._num_unreached_before = self.num_unreached(is_started=is_started)
        self.num += 1
        self.present = self.take()
