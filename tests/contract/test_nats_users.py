"""What a role may not say or hear, asked of a real server: a worker cannot grant, a gateway cannot write rules."""

import asyncio
import contextlib
import gc
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.errors import BadRequestError
from tests.contract.worlds import NatsServer

from weir.bus.nats import NatsBus
from weir.bus.nats_users import NATS_ROLES, NatsRole, denied, make_seed, server_config
from weir.bus.protocol import BusUnavailable
from weir.bus.subjects import Subjects

SUBJECTS = Subjects("users")
ROLES_OF_SUBJECTS: tuple[tuple[str, NatsRole, NatsRole | None], ...] = (
    (SUBJECTS.grant("g-1"), "scheduler", "gateway"),
    (SUBJECTS.revoke("g-1"), "scheduler", "gateway"),
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
    (SUBJECTS.prefixes, "transfer", "scheduler"),
)
"""Who says it, and who hears it; None: a stream does."""
OWNERS_OF_BUCKETS: Mapping[str, NatsRole] = {
    SUBJECTS.leader_bucket: "scheduler",
    SUBJECTS.configuration_bucket: "scheduler",
    SUBJECTS.counters_bucket: "scheduler",
    SUBJECTS.keys_bucket: "gateway",
    SUBJECTS.workers_bucket: "worker",
}

Connect = Callable[[NatsRole], Awaitable["Asking"]]


class Asking:
    """A client of one role that remembers what the server denied it."""

    def __init__(self) -> None:
        self.client = Client()
        self.errors: list[str] = []

    async def connect(self, url: str, seed_file: Path) -> None:
        await self.client.connect(url, nkeys_seed=str(seed_file), error_cb=self._on_error, max_reconnect_attempts=1)

    async def _on_error(self, error: Exception) -> None:
        self.errors.append(str(error).lower())

    async def denials(self) -> list[str]:
        """What it was denied since the last call, when the server has seen all that was sent."""
        await self.client.flush()
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
    config.write_text(server_config({role: path.read_text() for role, path in seeds.items()}, SUBJECTS))
    started = NatsServer(folder, "-c", str(config))
    started.start()
    yield started
    started.kill()


@pytest.fixture
async def connect(server: NatsServer, seeds: Mapping[NatsRole, Path]) -> AsyncIterator[Connect]:
    made: list[Asking] = []

    async def connect_as(role: NatsRole) -> Asking:
        asking = Asking()
        await asking.connect(server.url, seeds[role])
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
            found({"prefixes_of": "a-1", "drain": "w-1", "role": "w-1"}.get(name, "g-1")) if callable(found) else found
        )
    buckets_and_streams = {name for name in every if not name.startswith("weir.")}
    assert every - buckets_and_streams == named
    answers = {SUBJECTS.responses_bucket("g-1"), SUBJECTS.audit_stream}
    assert buckets_and_streams - answers == set(OWNERS_OF_BUCKETS)


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
    await gateway.client.flush()
    await worker.client.publish(SUBJECTS.grant("g-1"), b"forged")
    await worker.client.flush()
    await scheduler.client.publish(SUBJECTS.grant("g-1"), b"true")
    assert (await heard.next_msg(5)).data == b"true"


@pytest.mark.parametrize("role", NATS_ROLES)
async def test_entries_of_a_bucket_are_written_by_its_owner_alone(connect: Connect, role: NatsRole) -> None:
    asking = await connect(role)
    for bucket, owner in OWNERS_OF_BUCKETS.items():
        await make_bucket(await connect(owner), bucket)
        store = await asking.client.jetstream().key_value(bucket)
        if role == owner:
            await store.put("entry", b"true")
            continue
        with pytest.raises((NatsError, TimeoutError)):
            await asyncio.wait_for(store.put("entry", b"forged"), 0.5)
        assert await asking.denials() != []


@pytest.mark.parametrize("role", ["worker", "transfer", "operator"])
async def test_who_owns_no_durable_store_cannot_take_one_away(connect: Connect, role: NatsRole) -> None:
    asking, owner = await connect(role), await connect("scheduler")
    await make_bucket(owner, SUBJECTS.counters_bucket)
    stream = f"KV_{SUBJECTS.counters_bucket}"
    before = (await owner.client.jetstream().stream_info(stream)).config
    shorter = replace(before, max_age=1.0)
    jetstream = asking.client.jetstream()
    for change in (jetstream.delete_stream(stream), jetstream.purge_stream(stream), jetstream.update_stream(shorter)):
        with pytest.raises((NatsError, TimeoutError)):
            await asyncio.wait_for(change, 0.5)
        assert await asking.denials() != []
    assert (await owner.client.jetstream().stream_info(stream)).config == before


async def make_bucket(owner: Asking, bucket: str) -> None:
    with contextlib.suppress(BadRequestError):  # an earlier test's
        await owner.client.jetstream().create_key_value(bucket=bucket)


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
    config = server_config(texts, SUBJECTS)
    assert not any(seed in config for seed in texts.values())
    assert len(set(texts.values())) == len(NATS_ROLES)
    assert denied("worker", SUBJECTS).publish != ()
