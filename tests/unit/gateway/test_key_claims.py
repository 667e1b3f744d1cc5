"""Whose a key is: any number of gateways that race, die between any two steps, and are asked while they do."""

import itertools
from collections.abc import Coroutine, Generator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.bus.keys import BODY_DIGEST_BYTES, AskHolder, Holding, KeyRecord, KeyStatus
from weir.bus.protocol import KeyConflict
from weir.core.errors import AlreadyExists, InvalidRequest, Unavailable
from weir_gateway.keys.claims import Claim, KeyedBody, claim

SEED = (7).to_bytes(8, "big")


def body_of(kind: int = 0, resume_from: int | None = None) -> KeyedBody:
    return KeyedBody("name", bytes([kind]) * BODY_DIGEST_BYTES, SEED, resume_from, "Idempotency-Key", "Last-Event-ID")


class _Step:
    """Awaited before and after each access: there others go on, or the gateway dies."""

    def __await__(self) -> Generator[None, None, None]:
        yield


@dataclass
class FakeGateway:
    """What it would say when asked: it has a request while it is claiming, and while it runs one."""

    gateway_id: str
    world: "World"
    is_dead: bool = False
    is_claiming: bool = False
    held: Claim | None = None
    has_client: bool = False
    claims: list[Claim] = field(default_factory=list)

    def answer(self, question: AskHolder) -> Holding:
        if self.is_claiming:
            return Holding.HELD
        if self.held is None:
            return Holding.FREE
        if self.has_client and not question.takes_over:
            return Holding.HELD
        self.held, self.has_client = None, False
        return Holding.YIELDED

    async def try_get(self, key_name: str) -> Claim | None:
        await _Step()
        found = self.world.stored
        await _Step()
        return found

    async def write(self, key_name: str, record: KeyRecord, revision: int) -> int:
        await _Step()
        at = 0 if self.world.stored is None else self.world.stored.revision
        if at != revision:
            raise KeyConflict("another one")
        self.world.stored = Claim(record, next(self.world.revisions))
        self.world.written.append(record)
        written = self.world.stored.revision
        await _Step()
        return written

    async def ask(self, gateway_id: str, question: AskHolder) -> Holding | None:
        await _Step()
        other = self.world.gateways[int(gateway_id)]
        answer = None if other.is_dead else other.answer(question)
        await _Step()
        return answer

    async def serve(self, body: KeyedBody) -> None:
        """As the gateway does: what it runs is attached to, and what is being claimed is refused."""
        if self.held is not None or self.is_claiming:
            return
        self.is_claiming = True
        try:
            self.held = await claim(body, self.gateway_id, self, lambda: f"r{next(self.world.ids)}")
            self.has_client = True
            self.claims.append(self.held)
        finally:
            self.is_claiming = False

    async def end(self, status: KeyStatus) -> None:
        """Its request ends; the entry stays as it is if somebody else has written since."""
        held, self.held, self.has_client = self.held, None, False
        if held is not None:
            try:
                await self.write("name", replace(held.record, status=status, num_output_tokens=5), held.revision)
            except KeyConflict:
                return


class World:
    """Three gateways and one bucket."""

    def __init__(self) -> None:
        self.stored: Claim | None = None
        self.written: list[KeyRecord] = []
        self.revisions = itertools.count(1)
        self.ids = itertools.count(1)
        self.gateways = [FakeGateway(str(index), self) for index in range(3)]
        self.running: list[tuple[FakeGateway, Coroutine[Any, Any, None]]] = []

    def begin(self, gateway: FakeGateway, work: Coroutine[Any, Any, None]) -> None:
        self.running.append((gateway, work))

    def step(self, index: int) -> None:
        """One of those that run goes on to its next await."""
        if not self.running:
            return
        work = self.running[index % len(self.running)][1]
        try:
            work.send(None)
        except (StopIteration, Unavailable, AlreadyExists, InvalidRequest):
            self.running = [entry for entry in self.running if entry[1] is not work]

    def kill(self, index: int) -> None:
        """Wherever it is: between any two of its steps. Its successor is another gateway, under a new id."""
        gateway = self.gateways[index]
        for other, work in self.running:
            if other is gateway:
                work.close()
        self.running = [entry for entry in self.running if entry[0] is not gateway]
        gateway.is_dead, gateway.held = True, None
        fresh = FakeGateway(str(len(self.gateways)), self)
        self.gateways.append(fresh)

    def alive(self) -> list[FakeGateway]:
        return [gateway for gateway in self.gateways if not gateway.is_dead]

    def finish(self, work: Coroutine[Any, Any, None]) -> BaseException | None:
        """Alone, to its end."""
        try:
            while True:
                work.send(None)
        except StopIteration:
            return None
        except (Unavailable, AlreadyExists, InvalidRequest) as error:
            return error


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["send", "send", "resume", "other body", "step", "step", "step", "run", "kill", "end", "leave"]
        ),
        st.integers(0, 5),
    ),
    max_size=60,
)


def act(world: World, kind: str, number: int) -> None:
    alive = world.alive()
    gateway = alive[number % len(alive)]
    match kind:
        case "send" | "resume":
            world.begin(gateway, gateway.serve(body_of(resume_from=2 if kind == "resume" else None)))
        case "other body" if world.stored is not None:
            world.begin(gateway, gateway.serve(body_of(1)))
        case "step":
            world.step(number)
        case "run":
            while world.running:
                world.step(number)
        case "kill":
            world.kill(world.gateways.index(gateway))
        case "end" if not gateway.is_claiming:
            world.begin(gateway, gateway.end(KeyStatus.FINISHED if number % 2 else KeyStatus.ENDED))
        case "leave":
            gateway.has_client = False


@settings(max_examples=400, deadline=None)
@given(ACTIONS)
def test_whoever_races_or_dies_no_attempt_is_run_twice_and_a_client_that_tries_again_is_served(
    actions: list[tuple[str, int]],
) -> None:
    world = World()
    for kind, number in actions:
        act(world, kind, number)
        check(world)
    while world.running:
        world.step(0)
        check(world)
    for other in world.alive():
        other.has_client = False
    survivor = world.alive()[0]
    error = world.finish(survivor.serve(body_of()))
    assert error is None
    assert survivor.held is not None, "nobody else has a client, so that it is served"
    check(world)


def check(world: World) -> None:
    """Of what was ever claimed: the body and the seed are the first one's, and no attempt is two gateways'. Of those
    that live one runs it at most."""
    claims = [entry.record for gateway in world.gateways for entry in gateway.claims]
    assert len({record.body_digest for record in claims}) <= 1
    assert {record.seed for record in claims} <= {SEED}
    assert len({entry.revision for gateway in world.gateways for entry in gateway.claims}) == len(claims)
    attempts = [(record.request_id, record.first_dispatch) for record in claims]
    assert len(set(attempts)) == len(attempts)
    assert sum(gateway.held is not None for gateway in world.alive()) <= 1


def a_world_where(gateway_runs: KeyStatus = KeyStatus.RUNNING) -> tuple[World, FakeGateway, FakeGateway]:
    world = World()
    one, other = world.gateways[:2]
    assert world.finish(one.serve(body_of())) is None
    if gateway_runs is not KeyStatus.RUNNING:
        world.finish(one.end(gateway_runs))
    return world, one, other


def test_what_a_dead_gateway_had_goes_on_under_its_id_and_above_all_its_dispatches() -> None:
    world, one, other = a_world_where()
    world.kill(0)
    assert world.finish(other.serve(body_of())) is None
    assert other.held is not None
    assert other.held.record.request_id == one.claims[0].record.request_id
    assert other.held.record.first_dispatch == 1001
    assert other.held.record.seed == one.claims[0].record.seed


@pytest.mark.parametrize("status", [KeyStatus.FINISHED, KeyStatus.ENDED])
def test_what_has_ended_is_computed_again_as_a_new_request_with_the_same_seed(status: KeyStatus) -> None:
    world, one, other = a_world_where(status)
    assert world.finish(other.serve(replace(body_of(), seed=bytes(8)))) is None
    assert other.held is not None
    assert other.held.record.request_id != one.claims[0].record.request_id
    assert (other.held.record.first_dispatch, other.held.record.seed) == (1, SEED)


def test_while_its_gateway_has_a_client_another_one_is_told_to_try_again_unless_it_says_where_it_goes_on() -> None:
    world, one, other = a_world_where()
    error = world.finish(other.serve(body_of()))
    assert isinstance(error, Unavailable)
    assert error.retry_after_s == 1.0
    assert world.finish(other.serve(body_of(resume_from=2))) is None
    assert one.held is None
    assert other.held is not None


def test_a_place_beyond_the_end_of_a_finished_answer_is_refused() -> None:
    world, _, other = a_world_where(KeyStatus.FINISHED)
    error = world.finish(other.serve(body_of(resume_from=6)))
    assert isinstance(error, InvalidRequest)
    assert str(error) == "Last-Event-ID: is 6; the answer has 5 tokens"


def test_another_body_is_refused_whoever_has_the_key() -> None:
    world, _, other = a_world_where()
    world.kill(0)
    assert isinstance(world.finish(other.serve(body_of(1))), AlreadyExists)
