"""Looks up the cached prefix of each prompt before the engine gets it, and lets others use what the engine computes.

    request manager ── Add(prompt) ──> match with the arena ── Give, Add(prompt and pages) ──> engine
    request manager ── Cancel, FailAll ──────────────────────────────────────────────────────> engine

A prompt whose match is not answered when it is cancelled goes to the engine as it is, which ends it in the usual way.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from weir.core.errors import WeirError
from weir.engine.messages import (
    AddSequence,
    Arrival,
    CancelSequence,
    ChunkComputed,
    Command,
    EngineReport,
    FailAllSequences,
    FailSequence,
    HandOffReady,
    SequenceEnded,
    SequenceForgotten,
    SequenceKey,
)
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.kv.messages import PageChain, PrefixMatch, PrefixSource
from weir.worker.arena.arena import Arena
from weir.worker.arena.page_keeper import PageKeeper, hash_pages
from weir.worker.tasks import WorkerTasks

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Prompt:
    """A prompt in the engine. `num_sealed`: its first pages that others can use already."""

    hashes: tuple[bytes, ...]
    match_id: int
    num_sealed: int


class Prefixes:
    """Between the request manager and the engine."""

    def __init__(
        self,
        arena: Arena,
        keeper: PageKeeper,
        post: Callable[[Command], None],
        request_shutdown: Callable[[str], None],
        most_pages_ahead: int | None = None,
    ) -> None:
        """`most_pages_ahead`: what a prompt needs at a time behind its cached prefix; None: all its pages."""
        self._arena = arena
        self._most_pages_ahead = most_pages_ahead
        self._keeper = keeper
        self._post = post
        self._matching: dict[SequenceKey, Arrival] = {}
        self._prompts: dict[SequenceKey, _Prompt] = {}
        self._tasks = WorkerTasks(request_shutdown)
        self._num_failures = 0

    def post(self, command: Command) -> None:
        """Passes a command to the engine, a prompt once the arena has answered. Raises InboxFull."""
        match command:
            case AddSequence(arrival) if arrival.slot is None:
                self._start(arrival)
                return
            case CancelSequence(key) | FailSequence(key):
                self._post_unmatched(key)
            case FailAllSequences():
                for key in list(self._matching):
                    self._post_unmatched(key)
            case _:
                pass
        self._post(command)

    def hashes_of(self, key: SequenceKey) -> tuple[bytes, ...]:
        """The hashes of the full pages of a prompt in the engine; none if they are not to be shared."""
        prompt = self._prompts.get(key)
        return () if prompt is None else prompt.hashes

    def on_report(self, report: EngineReport) -> None:
        """Call it before the keeper's."""
        computed: list[ChunkComputed] = []
        num_given_back: dict[SequenceKey, int] = {}
        for event in report.events:
            match event:
                case ChunkComputed():
                    computed.append(event)
                case HandOffReady(key):
                    num_given_back[key] = event.first_page
                case SequenceEnded(key) | SequenceForgotten(key):
                    prompt = self._prompts.pop(key, None)
                    if prompt is not None and prompt.match_id and isinstance(event, SequenceEnded):
                        self._keeper.end_match(prompt.match_id)
                case _:
                    pass
        for event in computed:  # the release of what has ended seals it, a hand-off the pages that go with it
            self._seal(event, num_given_back.get(event.key, len(event.page_ids)))

    async def stop(self) -> None:
        """Ends all calls; what an unanswered match was given stays with the lease, which ends too."""
        await self._tasks.stop()

    def metrics(self) -> dict[str, float]:
        return {"num_matching": float(len(self._matching)), "match_failures_total": float(self._num_failures)}

    def _start(self, arrival: Arrival) -> None:
        params = arrival.params
        num_tokens = len(params.prompt_token_ids) + len(arrival.output_token_ids)
        if not (self._arena.keeps_prefixes and params.prefix_seed and num_tokens >= PAGE_TOKENS):
            num_pages, most_pages = num_pages_for(num_tokens), self._most_pages_ahead
            self._keeper.anticipate(num_pages if most_pages is None else min(num_pages, most_pages), num_slots=1)
            self._post(AddSequence(arrival))
            return
        key = SequenceKey.of(params)
        self._matching[key] = arrival
        self._tasks.spawn(self._match(key, arrival), f"match of {params.request_id}")

    def _post_unmatched(self, key: SequenceKey) -> None:
        """The engine gets the prompt without waiting for its match, or it stays here: raises InboxFull."""
        arrival = self._matching.get(key)
        if arrival is not None:
            self._post(AddSequence(arrival))
            del self._matching[key]

    async def _match(self, key: SequenceKey, arrival: Arrival) -> None:
        token_ids = (*arrival.params.prompt_token_ids, *arrival.output_token_ids)
        hashes = await hash_pages(token_ids, arrival.params.prefix_seed)
        match = await self._try_match(hashes, num_pages_for(len(token_ids)), _source_of(arrival))
        if self._matching.get(key) is not arrival:
            if match is not None:
                await self._give_back(match)
            return
        del self._matching[key]
        if match is None:
            self._prompts[key] = _Prompt(hashes, match_id=0, num_sealed=0)
            self._post(AddSequence(arrival))
            return
        num_matched = len(match.page_ids)
        self._keeper.give(match.acquired)
        self._prompts[key] = _Prompt(hashes, match.match_id, num_matched)
        matched = replace(
            arrival,
            block_table=match.page_ids,
            num_computed_tokens=num_matched * PAGE_TOKENS,
            num_shared_pages=num_matched,
        )
        self._post(AddSequence(matched))

    async def _try_match(
        self, hashes: tuple[bytes, ...], num_pages: int, source: PrefixSource | None
    ) -> PrefixMatch | None:
        """None: the arena does not answer. The prompt is computed as if nothing were cached."""
        try:
            return await self._arena.match(hashes, num_pages, 1, self._most_pages_ahead, source)
        except WeirError as error:
            self._num_failures += 1
            _log.warning("a prompt's prefix was not looked up: %s", error)
            return None

    async def _give_back(self, match: PrefixMatch) -> None:
        acquired = match.acquired
        try:
            await self._arena.release(acquired.page_ids, acquired.slots, [PageChain(match.page_ids)], [match.match_id])
        except WeirError as error:  # the client sees to it that they are returned when the service is back
            _log.warning("a match that nobody needs is returned later: %s", error)

    def _seal(self, chunk: ChunkComputed, num_pages: int) -> None:
        """Others may go on from here while the rest of the prompt is computed. Of the first `num_pages` at most."""
        prompt = self._prompts.get(chunk.key)
        if prompt is None:
            return
        num_full = min((chunk.start + chunk.num_tokens) // PAGE_TOKENS, len(prompt.hashes))
        first, end = prompt.num_sealed, min(num_full, num_pages)
        if end > first:
            prompt.num_sealed = end
            chain = PageChain(chunk.page_ids[first:end], prompt.hashes[first:end], prompt.hashes[:first])
            self._tasks.spawn(self._try_seal(chain), f"seal of {chunk.key.request_id}")

    async def _try_seal(self, chain: PageChain) -> None:
        try:
            await self._arena.seal(chain)
        except WeirError as error:  # others compute these pages themselves
            self._num_failures += 1
            _log.warning("%d pages are not shared: %s", len(chain.page_ids), error)


def _source_of(arrival: Arrival) -> PrefixSource | None:
    source = PrefixSource(arrival.prefix_source, arrival.params.traceparent, arrival.prefix_is_expected)
    return source if source.address or source.traceparent else None
