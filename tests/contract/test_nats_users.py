"""What a role may say and hear, asked of a real server: a worker cannot grant, a gateway cannot write rules."""

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from tests.contract.worlds import NatsServer

from weir.bus.nats import NatsBus
from weir.bus.nats_users import NATS_ROLES, NatsRole, make_seed, public_key, rights_of, server_config
from weir.bus.protocol import BusMessage, BusTimeout, BusUnavailable
from weir.bus.subjects import Subjects, entries_of, stream_of

SUBJECTS = Subjects("users")
ROLES_OF_SUBJECTS: tuple[tuple[str, NatsRole, NatsRole | None], ...] = (
    (SUBJECTS.grant("g-1"), "scheduler", "gateway"),
    (SUBJECTS.revoke("g-1"), "scheduler", "gateway"),
    (SUBJECTS.migrate("g-1"), "scheduler", "gateway"),
    (SUBJECTS.queues, "scheduler", "gateway"),
    (SUBJECTS.leader_changed, "scheduler", "gateway"),
    (SUBJECTS.drain("w-1"), "scheduler", "worker"),
    (SUBJECTS.role("w-1"), "scheduler", "worker"),
    (SUBJECTS.prefixes_of("a-1"), "scheduler", "transfer"),
    (SUBJECTS.submit, "gateway", "scheduler"),
    (SUBJECTS.cancel, "gateway", "scheduler"),
    (SUBJECTS.prefilled, "gateway", "scheduler"),
    (SUBJECTS.finish, "gateway", "scheduler"),
    (SUBJECTS.reconcile, "gateway", "scheduler"),
    (SUBJECTS.key("g-1"), "gateway", "gateway"),
    (SUBJECTS.audit, "gateway", None),
    (SUBJECTS.make_responses, "gateway", "scheduler"),
    (SUBJECTS.make_audit, "gateway", "scheduler"),
    (SUBJECTS.prefixes, "transfer", "scheduler"),
)
"""Who says it, and who hears it; None: a stream does."""
WRITERS_OF_BUCKETS: Mapping[str, NatsRole] = {
    SUBJECTS.leader_bucket: "scheduler",
    SUBJECTS.configuration_bucket: "scheduler",
    SUBJECTS.counters_bucket: "scheduler",
    SUBJECTS.keys_bucket: "gateway",
    SUBJECTS.responses_bucket("t-1"): "gateway",
    SUBJECTS.workers_bucket: "worker",
}
WATCHERS_OF_BUCKETS: Mapping[str, tuple[NatsRole, ...]] = {
    SUBJECTS.configuration_bucket: ("gateway", "worker"),
    SUBJECTS.counters_bucket: ("scheduler",),
    SUBJECTS.workers_bucket: ("scheduler", "gateway"),
}
"""Those who list are among them."""
READERS_OF_BUCKETS: Mapping[str, tuple[NatsRole, ...]] = {
    SUBJECTS.leader_bucket: ("scheduler", "gateway"),
    SUBJECTS.configuration_bucket: ("scheduler", "gateway"),
    SUBJECTS.counters_bucket: ("scheduler",),
    SUBJECTS.keys_bucket: ("gateway",),
    SUBJECTS.responses_bucket("t-1"): ("gateway",),
    SUBJECTS.workers_bucket: ("gateway",),
}
"""Of single entries."""
STREAMS = (*map(stream_of, WRITERS_OF_BUCKETS), SUBJECTS.audit_stream)

Connect = Callable[[NatsRole], Awaitable["Asking"]]


class Asking:
    """A client of one role that remembers what the server denied it."""

    def __init__(self) -> None:
        self.client = Client()
        self.errors: list[str] = []

    async def connect(self, url: str, seed_file: Path, role: NatsRole) -> None:
        await self.client.connect(
            url,
            nkeys_seed=str(seed_file),
            error_cb=self._on_error,
            max_reconnect_attempts=1,
            inbox_prefix=SUBJECTS.inbox(role),
        )

    async def sent(self) -> None:
        """When the server has seen all that was sent. Twice: the client's PING overtakes what it has yet to write."""
        await self.client.flush()
        await self.client.flush()

    async def is_allowed(self, subject: str, payload: bytes = b"") -> bool:
        """Whether the server takes what it publishes there."""
        await self.client.publish(subject, payload)
        return not await self.denials()

    async def _on_error(self, error: Exception) -> None:
        self.errors.append(str(error).lower())

    async def denials(self) -> list[str]:
        """What it was denied since the last call, when the server has seen all that was sent."""
        await self.sent()
        await asyncio.sleep(0.05)  # errors come by a callback of their own
        found, self.errors = [error for error in self.errors if "permissions violation" in error], []
        return found


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Mapping[NatsRole, Path]:
    folder = tmp_path_factory.mktemp("seeds")
    for role in NATS_ROLES:
        (folder / role).write_text(make_seed())
    return {role: folder / role for role in NATS_ROLES}


@pytest.fixture(scope="module")
def server(seeds: Mapping[NatsRole, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    folder = tmp_path_factory.mktemp("nats")
    config = folder / "nats.conf"
    config.write_text(server_config({role: public_key(path.read_text()) for role, path in seeds.items()}, SUBJECTS))
    started = NatsServer(folder, "-c", str(config))
    started.start()
    yield started
    started.kill()


@pytest.fixture
async def connect(server: NatsServer, seeds: Mapping[NatsRole, Path]) -> AsyncIterator[Connect]:
    made: list[Asking] = []

    async def connect_as(role: NatsRole) -> Asking:
        asking = Asking()
        await asking.connect(server.url, seeds[role], role)
        made.append(asking)
        return asking

    yield connect_as
    for asking in made:
        await asking.client.close()


def test_every_subject_of_the_bus_is_in_this_table() -> None:
    named = {subject for subject, _, _ in ROLES_OF_SUBJECTS}
    every = set()
    for name in dir(Subjects):
        found = getattr(SUBJECTS, name)
        if name.startswith(("_", "of_")) or name == "namespace":
            continue
        every.add(
            found({"prefixes_of": "a-1", "drain": "w-1", "role": "w-1", "responses_bucket": "t-1"}.get(name, "g-1"))
            if callable(found)
            else found
        )
    buckets_and_streams = {name for name in every if not name.startswith(("weir.", "_INBOX"))}
    assert {name for name in every if name.startswith("weir.")} == named
    assert buckets_and_streams == {*WRITERS_OF_BUCKETS, SUBJECTS.audit_stream}


@pytest.mark.parametrize("role", NATS_ROLES)
async def test_a_role_says_its_own_and_is_denied_what_others_say(connect: Connect, role: NatsRole) -> None:
    asking = await connect(role)
    for subject, sender, _ in ROLES_OF_SUBJECTS:
        await asking.client.publish(subject, b"forged")
        assert bool(await asking.denials()) == (role != sender), subject


@pytest.mark.parametrize("role", NATS_ROLES)
async def test_a_role_hears_its_own_and_is_denied_what_others_hear(connect: Connect, role: NatsRole) -> None:
    asking = await connect(role)
    for subject, _, hearer in ROLES_OF_SUBJECTS:
        if hearer is not None:
            await asking.client.subscribe(subject)
            assert bool(await asking.denials()) == (role != hearer), subject


async def test_what_is_denied_reaches_nobody(connect: Connect) -> None:
    gateway, worker, scheduler = await connect("gateway"), await connect("worker"), await connect("scheduler")
    heard = await gateway.client.subscribe(SUBJECTS.grant("g-1"))
    await gateway.sent()
    await worker.client.publish(SUBJECTS.grant("g-1"), b"forged")
    await worker.sent()
    await scheduler.client.publish(SUBJECTS.grant("g-1"), b"true")
    assert (await heard.next_msg(5)).data == b"true"


@pytest.mark.parametrize("role", NATS_ROLES)
async def test_answers_to_one_role_are_heard_by_no_other(connect: Connect, role: NatsRole) -> None:
    asking = await connect(role)
    for other in NATS_ROLES:
        await asking.client.subscribe(f"{SUBJECTS.inbox(other)}.>")
        assert bool(await asking.denials()) == (role != other), other
    for everything in (">", "_INBOX.>", "$JS.>", "$KV.>", "weir.>", f"weir.{SUBJECTS.namespace}.>"):
        await asking.client.subscribe(everything)
        assert await asking.denials() != [], everything


@pytest.mark.parametrize("role", NATS_ROLES)
async def test_entries_of_a_bucket_are_written_watched_and_read_by_those_who_do(
    connect: Connect, role: NatsRole
) -> None:
    asking = await connect(role)
    for bucket, writer in WRITERS_OF_BUCKETS.items():
        entry, stream = entries_of(bucket).replace(">", "entry"), stream_of(bucket)
        assert await asking.is_allowed(entry, b"true") == (role == writer), bucket
        watching = f"$JS.API.CONSUMER.CREATE.{stream}.name.{entries_of(bucket)}"
        assert await asking.is_allowed(watching) == (role in WATCHERS_OF_BUCKETS.get(bucket, ())), bucket
        reading = f"$JS.API.STREAM.MSG.GET.{stream}"
        assert await asking.is_allowed(reading) == (role in READERS_OF_BUCKETS[bucket]), bucket
        assert not await asking.is_allowed(f"$JS.API.DIRECT.GET.{stream}.{entry}"), bucket
    assert await asking.is_allowed(f"$JS.API.STREAM.MSG.GET.{SUBJECTS.audit_stream}") == (role == "operator")


@pytest.mark.parametrize("role", NATS_ROLES)
async def test_the_scheduler_alone_makes_streams_and_nobody_takes_one_away(connect: Connect, role: NatsRole) -> None:
    asking = await connect(role)
    for stream in (*STREAMS, "another"):
        is_scheduler = role == "scheduler"
        assert await asking.is_allowed(f"$JS.API.STREAM.CREATE.{stream}") == is_scheduler
        changing = is_scheduler and stream == SUBJECTS.audit_stream
        assert await asking.is_allowed(f"$JS.API.STREAM.UPDATE.{stream}") == changing
        for call in ("DELETE", "PURGE", "RESTORE", "SNAPSHOT", "MSG.DELETE"):
            assert not await asking.is_allowed(f"$JS.API.STREAM.{call}.{stream}"), (call, stream)
        for call in ("DURABLE.CREATE", "DELETE", "MSG.NEXT"):
            assert not await asking.is_allowed(f"$JS.API.CONSUMER.{call}.{stream}.name"), (call, stream)
        assert not await asking.is_allowed(f"$JS.API.CONSUMER.CREATE.{stream}")
        assert not await asking.is_allowed(f"$JS.API.CONSUMER.LIST.{stream}")


@pytest.mark.parametrize("role", [role for role in NATS_ROLES if role != "scheduler"])
def test_nobody_but_the_scheduler_can_have_the_server_deliver_what_he_writes(role: NatsRole) -> None:
    """Issue 8274 of nats-server: it does not check where a consumer delivers to."""
    assert not any(
        writer == role and role in WATCHERS_OF_BUCKETS.get(bucket, ()) for bucket, writer in WRITERS_OF_BUCKETS.items()
    )


@pytest.mark.parametrize("role", NATS_ROLES)
def test_who_may_answer_wherever_he_is_asked_to_cannot_ask_himself(role: NatsRole) -> None:
    """He would name what he is denied as the place for the answer."""
    if rights_of(role, SUBJECTS).answers:
        assert not any(sender == hearer == role for _, sender, hearer in ROLES_OF_SUBJECTS)
        assert not any(subject.startswith("_INBOX") for subject in rights_of(role, SUBJECTS).publish)


async def test_an_answer_reaches_who_asked_and_nobody_is_answered_twice(connect: Connect) -> None:
    pairs: tuple[tuple[str, NatsRole, NatsRole], ...] = (
        (SUBJECTS.submit, "gateway", "scheduler"),
        (SUBJECTS.grant("g-1"), "scheduler", "gateway"),
        (SUBJECTS.key("g-1"), "gateway", "gateway"),
        (SUBJECTS.drain("w-1"), "scheduler", "worker"),
        (SUBJECTS.prefixes_of("a-1"), "scheduler", "transfer"),
    )
    for subject, sender, hearer in pairs:
        asks, answers = await connect(sender), await connect(hearer)

        async def answer(message: Msg) -> None:
            await message.respond(b"yes")

        subscription = await answers.client.subscribe(subject, cb=answer)
        await answers.sent()
        assert (await asks.client.request(subject, b"?", timeout=5)).data == b"yes", subject
        assert await answers.denials() == []
        await subscription.unsubscribe()


async def test_a_bus_that_is_denied_something_says_so_and_goes_on(
    server: NatsServer, seeds: Mapping[NatsRole, Path], caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, worker = [
        await NatsBus.connect(server.url, name=role, seed_file=str(seeds[role]), inbox=SUBJECTS.inbox(role))
        for role in ("scheduler", "worker")
    ]
    with pytest.raises(BusTimeout):
        await worker.request(SUBJECTS.submit, b"", timeout_s=0.3)
    assert "permissions violation for publish" in caplog.text
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    with pytest.raises(BusTimeout):
        await worker.bucket(SUBJECTS.counters_bucket)
    await worker.subscribe(SUBJECTS.grant("g-1"), answer_nothing)
    assert worker.is_connected
    await scheduler.bucket(SUBJECTS.workers_bucket, ttl_s=60)
    bucket = await worker.open_bucket(SUBJECTS.workers_bucket)
    await bucket.put("w-1", b"here")
    assert [entry.value for entry in await (await scheduler.bucket(SUBJECTS.workers_bucket)).list_entries()] == [
        b"here"
    ]
    await bucket.delete("w-1")
    for bus in (worker, scheduler):
        await bus.close()


async def answer_nothing(message: BusMessage) -> None:
    """Of nobody."""


async def test_without_a_key_or_with_another_nobody_connects(server: NatsServer, tmp_path: Path) -> None:
    (tmp_path / "other").write_text(make_seed())
    for seed_file in ("", str(tmp_path / "other")):
        with pytest.raises(BusUnavailable, match="credentials"):
            await NatsBus.connect(server.url, name="contract-test", timeout_s=1.0, seed_file=seed_file)
    (tmp_path / "cut").write_text(make_seed()[:20])
    with pytest.raises(BusUnavailable, match="cut: has no seed of an NKEY in it"):
        await NatsBus.connect(server.url, name="contract-test", timeout_s=1.0, seed_file=str(tmp_path / "cut"))
    with pytest.raises(BusUnavailable, match="none: No such file"):
        await NatsBus.connect(server.url, name="contract-test", timeout_s=1.0, seed_file=str(tmp_path / "none"))
    with warnings.catch_warnings():  # the client leaves the sockets of refused attempts to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def test_the_servers_configuration_has_no_secret(seeds: Mapping[NatsRole, Path]) -> None:
    texts = {role: path.read_text() for role, path in seeds.items()}
    config = server_config({role: public_key(seed) for role, seed in texts.items()}, SUBJECTS)
    assert not any(seed in config for seed in texts.values())
    assert len(set(texts.values())) == len(NATS_ROLES)
