"""Puts the output tokens of one request in order. They come from two workers, on streams that can break and repeat."""

from collections.abc import Sequence

from weir.core.life import Attempt, FinishReason


class TokenConflict(Exception):
    """A worker contradicts what was received before: going on could send wrong tokens."""


class TokenOrder:
    """The output so far.

        0 ................. next_index ....... a gap ....... [ahead] ....... max_tokens
        |-- token_ids: sent --|            |-- kept until the gap is filled --|

    A repeated token must be the same token. Older attempts are refused; a newer one goes on from where this is, since
    the tokens of a request do not depend on its attempt.
    """

    def __init__(self, attempt: Attempt, max_tokens: int, *, max_ahead: int = 4096) -> None:
        self._attempt = attempt
        self._max_tokens = max_tokens
        self._max_ahead = max_ahead
        self._token_ids: list[int] = []
        self._ahead: dict[int, int] = {}
        self._end_index: int | None = None
        self._finish_reason: FinishReason | None = None

    @property
    def next_index(self) -> int:
        """Index of the first token that is not there yet."""
        return len(self._token_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """Those that are in order."""
        return self._token_ids

    @property
    def has_gap(self) -> bool:
        """Whether a later token, or the end, is known before an earlier token."""
        return bool(self._ahead) or (self._end_index is not None and self._end_index > self.next_index)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Set as soon as the end and everything before it are there."""
        return self._finish_reason if self._end_index == self.next_index else None

    def drop_ahead(self) -> None:
        """Forgets what came after a gap: it is to be computed again, after what is in order."""
        self._ahead.clear()
        self._end_index = self._finish_reason = None

    def push(
        self,
        attempt: Attempt,
        first_index: int,
        token_ids: list[int],
        finish_reason: FinishReason | None = None,
    ) -> list[int]:
        """Takes a worker's update and returns the tokens that are in order now, perhaps none.

        Raises:
            TokenConflict: an index past max_tokens or past the end, another token where one was before, or more than
                max_ahead tokens after a gap.
        """
        if attempt is not self._attempt:
            if attempt < self._attempt:
                return []
            self._attempt = attempt
        end_index = first_index + len(token_ids)
        if end_index > self._max_tokens:
            raise TokenConflict(f"token {end_index - 1} of at most {self._max_tokens}")
        if first_index == len(self._token_ids) and not self._ahead and self._end_index is None is finish_reason:
            self._token_ids.extend(token_ids)  # what nearly all updates are
            return token_ids
        for index, token_id in enumerate(token_ids, start=first_index):
            self._keep(index, token_id)
        if finish_reason is not None:
            self._set_end(end_index, finish_reason)
        self._check_end()
        return self._take_in_order()

    def _keep(self, index: int, token_id: int) -> None:
        known = self._token_ids[index] if index < self.next_index else self._ahead.get(index)
        if known is None:
            self._ahead[index] = token_id
        elif known != token_id:
            raise TokenConflict(f"token {index} was {known}, and is {token_id} now")

    def _set_end(self, end_index: int, finish_reason: FinishReason) -> None:
        if self._end_index not in (None, end_index):
            raise TokenConflict(f"the output ended after {self._end_index} tokens, and now after {end_index}")
        self._end_index = end_index
        self._finish_reason = finish_reason

    def _check_end(self) -> None:
        if self._end_index is None:
            return
        last_index = max(self._ahead, default=self.next_index - 1)
        if last_index >= self._end_index:
            raise TokenConflict(f"token {last_index} after the end at {self._end_index}")

    def _take_in_order(self) -> list[int]:
        ready: list[int] = []
        while (token_id := self._ahead.pop(len(self._token_ids), None)) is not None:
            self._token_ids.append(token_id)
            ready.append(token_id)
        if len(self._ahead) > self._max_ahead:
            raise TokenConflict(
                f"{len(self._ahead)} tokens wait for token {self.next_index}, at most {self._max_ahead}"
            )
        return ready
