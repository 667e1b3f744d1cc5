"""The requests with a key that this gateway has: those that run, and for a while those whose clients went away.

                 ┌─────────── resume_s over, too many kept, another gateway goes on ──────────┐
claimed ──> with a client ──> kept ──────────────────────────────────────────────────────> let go
                 ^   │          │ the client is back, and says from where; nothing is computed again
                 └───┴──────────┘
"""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from weir.bus.keys import AskHolder, HolderReply, Holding, KeyRecord, KeyStatus, key_name
from weir.bus.protocol import KeyConflict
from weir.core.errors import Cancelled, Unavailable, WeirError
from weir_gateway.driving.open_request import OpenRequest
from weir_gateway.keys.body import keyed_body
from weir_gateway.keys.claims import Claim, KeyedBody, KeyPort, busy, check_same, claim
from weir_gateway.keys.keyed_answer import KeyedAnswer
from weir_gateway.requests.request_end import RETRY_AFTER_S, RequestEnd
from weir_gateway.requests.succession import Succession
from weir_gateway.requests.validation import CheckedRequest

logger = logging.getLogger(__name__)

_MAX_KEEP_MS = 3_600_000
"""At workers, which refuse more."""
_BYTES_A_TOKEN = 40
_BYTES_A_LOGPROB = 120


@dataclass(frozen=True, slots=True)
class KeySettings:
    """`resume_s`: how long a request goes on, or its answer is kept, without its client, and at workers without this
    gateway, for another one. `max_kept` requests and `max_kept_bytes` of them are kept without their clients; over
    either bound the one that waited longest is let go."""

    resume_s: float = 30.0
    max_kept: int = 256
    max_kept_bytes: int = 64 << 20
    end_wait_s: float = 30.0
    """How long the outcome is tried to be written."""
    retry_interval_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request of a key that is to be started under this id."""

    checked: CheckedRequest
    request_id: str
    succession: Succession


class _KeptRequest:
    """One request. `answer` is its client's view, None while it has no client."""

    def __init__(self, body: KeyedBody, claimed: Claim, running: OpenRequest) -> None:
        self.body = body
        self.claimed = claimed
        self.running = running
        self.answer: KeyedAnswer | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self.is_let_go = False

    @property
    def num_bytes(self) -> int:
        """At most, roughly."""
        checked = self.running.checked
        num_prompt, num_output = len(checked.prompt_token_ids), checked.stop_rules.max_tokens
        num_logprobs = num_output * _with_chosen(checked.sampling.logprobs)
        num_logprobs += num_prompt * _with_chosen(checked.sampling.prompt_logprobs)
        return _BYTES_A_TOKEN * (num_prompt + num_output) + _BYTES_A_LOGPROB * num_logprobs

    def release(self) -> None:
        for state in self.running.states:
            state.released.set()

    def stop_expiry(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None


class KeyedRequests:
    """One a gateway."""

    def __init__(self, gateway_id: str, keys: KeyPort, settings: KeySettings) -> None:
        self._gateway_id = gateway_id
        self._keys = keys
        self._settings = settings
        self._held: dict[str, _KeptRequest] = {}
        self._waiting: dict[str, _KeptRequest] = {}
        """Those of `_held` that have no client; the one that has waited longest comes first."""
        self._claiming: set[str] = set()
        self._returning: set[str] = set()
        self._writing: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()

    async def open(self, checked: CheckedRequest, start: Callable[[Accepted], OpenRequest]) -> OpenRequest:
        """The answer to a request with a key, from where its client wants it. `start` is called if none runs here.

        Raises AlreadyExists for another body under the key, Unavailable while somebody else is getting the answer or
        the bucket cannot be reached, InvalidRequest for a place beyond the end.
        """
        attached = self.try_attach(checked)
        if attached is not None:
            return attached
        body = keyed_body(checked)
        return self._attach(await self._start(body, checked, start), body)

    def try_attach(self, checked: CheckedRequest) -> OpenRequest | None:
        """The same for a request that is here. None: it is not."""
        body = keyed_body(checked)
        held = self._held.get(body.key_name)
        if held is None:
            return None
        self._check_free(held, body)
        self._counts["attached"] += 1
        return self._attach(held, body)

    def holds(self, tenant: str, idempotency_key: str) -> bool:
        return bool(idempotency_key) and key_name(tenant, idempotency_key) in self._held

    def drop(self, tenant: str, idempotency_key: str) -> None:
        """Nobody comes back to it: it takes no room among those that are kept. What still runs is cancelled."""
        held = self._waiting.get(key_name(tenant, idempotency_key))
        if held is not None:
            self._forget(held)
            if not held.running.ended.done():
                held.running.cancel("nobody wants its answer any more")
            held.release()

    @contextmanager
    def returning(self, tenant: str, idempotency_key: str) -> Iterator[bool]:
        """Whether somebody comes back to a request that is here, and so needs no room for another one. That holds for
        one a key at a time: so many are checked at once as requests are held."""
        if not idempotency_key:
            yield False
            return
        name = key_name(tenant, idempotency_key)
        is_back = name in self._held and name not in self._returning
        if is_back:
            self._returning.add(name)
        try:
            yield is_back
        finally:
            if is_back:
                self._returning.discard(name)

    async def on_ask(self, question: AskHolder) -> HolderReply:
        """Another gateway wants to go on with a request."""
        held = self._held.get(question.key_name)
        if held is None:
            return HolderReply(Holding.HELD if question.key_name in self._claiming else Holding.FREE)
        if held.answer is not None and not question.takes_over:
            return HolderReply(Holding.HELD)
        self._counts["yielded"] += 1
        self._let_go(held, Unavailable("the answer goes on at another gateway", retry_after_s=RETRY_AFTER_S))
        return HolderReply(Holding.YIELDED)

    def drain(self) -> None:
        """Nobody can come back here: what waits for its client is let go, for another gateway to go on with."""
        for held in list(self._waiting.values()):
            self._let_go(held, Cancelled("the gateway is shutting down"))

    async def stop(self, wait_s: float = 2.0) -> None:
        """Outcomes are written as long as there is time. Those that are not, others ask for in vain."""
        if self._writing:
            await asyncio.wait(self._writing, timeout=wait_s)
        for task in self._writing:
            task.cancel()

    def metrics(self) -> dict[str, float]:
        names = ("claimed", "taken_over", "attached", "yielded", "expired", "lost", "ends_unwritten")
        counts = {f"keys_{name}_total": float(self._counts[name]) for name in names}
        return counts | {"keys_held": float(len(self._held)), "keys_kept": float(len(self._waiting))}

    def check_integrity(self) -> list[str]:
        return [
            f"key {name} waits for a client and has one"
            for name, held in self._waiting.items()
            if held.answer is not None or self._held.get(name) is not held
        ]

    async def _start(
        self, body: KeyedBody, checked: CheckedRequest, start: Callable[[Accepted], OpenRequest]
    ) -> _KeptRequest:
        if body.key_name in self._claiming:
            raise busy(body)
        self._claiming.add(body.key_name)
        try:
            claimed = await claim(body, self._gateway_id, self._keys, lambda: uuid.uuid4().hex)
            record = claimed.record
            self._counts["claimed" if record.first_dispatch == 1 else "taken_over"] += 1
            sampling = replace(checked.sampling, seed=int.from_bytes(record.seed, "big"))
            seeded = replace(checked, sampling=sampling)
            try:
                succession = Succession(record.first_dispatch, min(_MAX_KEEP_MS, round(self._settings.resume_s * 1000)))
                running = start(Accepted(seeded, record.request_id, succession))
            except BaseException:
                self._write_end(body.key_name, claimed, replace(record, status=KeyStatus.ENDED))
                raise
        finally:
            self._claiming.discard(body.key_name)
        held = self._held[body.key_name] = _KeptRequest(body, claimed, running)
        running.ended.add_done_callback(lambda ended: self._on_end(held, ended.result()))
        return held

    def _check_free(self, held: _KeptRequest, body: KeyedBody) -> None:
        """Raises AlreadyExists, or Unavailable."""
        check_same(body, held.body.body_digest)
        if held.answer is not None and not body.takes_over:
            raise busy(body)

    def _attach(self, held: _KeptRequest, body: KeyedBody) -> KeyedAnswer:
        if held.answer is not None:
            held.answer.oust(Unavailable("the answer goes on at another connection"))
        held.stop_expiry()
        self._waiting.pop(body.key_name, None)
        held.answer = KeyedAnswer(held.running, body, lambda answer: self._on_leave(held, answer))
        return held.answer

    def _on_leave(self, held: _KeptRequest, answer: KeyedAnswer) -> None:
        """The client is gone, or has everything."""
        if held.answer is not answer:
            return
        held.answer = None
        if held.running.ended.done():
            held.release()
        name = held.body.key_name
        if self._held.get(name) is not held:
            return
        self._waiting[name] = held
        held.expiry = asyncio.get_running_loop().call_later(self._settings.resume_s, self._expire, held)
        while self._is_over_bound():
            self._expire(next(iter(self._waiting.values())))

    def _is_over_bound(self) -> bool:
        num_bytes = sum(held.num_bytes for held in self._waiting.values())
        return len(self._waiting) > self._settings.max_kept or num_bytes > self._settings.max_kept_bytes

    def _expire(self, held: _KeptRequest) -> None:
        self._counts["expired"] += 1
        self._forget(held)
        held.running.cancel("its client has not come back")
        held.release()

    def _let_go(self, held: _KeptRequest, error: WeirError) -> None:
        """Whoever goes on with it writes the bucket's entry."""
        held.is_let_go = True
        self._forget(held)
        if held.answer is not None:
            held.answer.oust(error)
        held.running.cancel("another gateway goes on with it")
        held.release()

    def _forget(self, held: _KeptRequest) -> None:
        held.stop_expiry()
        self._held.pop(held.body.key_name, None)
        self._waiting.pop(held.body.key_name, None)

    def _on_end(self, held: _KeptRequest, ending: RequestEnd) -> None:
        """What has failed is not kept: sent again it is tried again."""
        if held.answer is None:
            held.release()
        record = held.claimed.record
        if ending.error is None:
            num_tokens = held.running.num_output_tokens
            outcome = replace(
                record,
                status=KeyStatus.FINISHED,
                finish_reason=ending.finish_reason,
                num_output_tokens=num_tokens,
            )
        else:
            if self._held.get(held.body.key_name) is held:
                self._forget(held)
            outcome = replace(record, status=KeyStatus.ENDED)
        if not held.is_let_go:
            self._write_end(held.body.key_name, held.claimed, outcome)

    def _write_end(self, name: str, claimed: Claim, outcome: KeyRecord) -> None:
        task = asyncio.create_task(self._keep_writing(name, claimed, outcome), name=f"outcome of {name}")
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _keep_writing(self, name: str, claimed: Claim, outcome: KeyRecord) -> None:
        try:
            async with asyncio.timeout(self._settings.end_wait_s):
                while True:
                    try:
                        await self._keys.write(name, outcome, claimed.revision)
                    except WeirError as error:
                        logger.debug("the outcome of %s: %s", name, error.message)
                        await asyncio.sleep(self._settings.retry_interval_s)
                    else:
                        return
        except KeyConflict:
            self._counts["lost"] += 1  # another gateway took this one for dead, and has computed the same
        except TimeoutError:
            self._counts["ends_unwritten"] += 1
        except Exception:  # the boundary of one outcome: without it the next gateway asks here
            logger.exception("the outcome of %s was not written", name)
            self._counts["ends_unwritten"] += 1


def _with_chosen(num_top: int | None) -> int:
    return 0 if num_top is None else 1 + num_top
