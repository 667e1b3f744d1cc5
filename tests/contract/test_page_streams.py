"""One contract over all kinds of page streams: what is wanted comes, just as it was offered, or the pull fails."""

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from weir.core.life import Attempt
from weir.kv.memory.page_access import InPlace
from weir.kv.movers.frames import (
    HEADER_BYTES,
)
from weir.kv.movers.listener import PageStreamListener
from weir.kv.movers.pipes import Buffer, PagePipe, PipeEnded, TcpPipe, TlsPipe, connect_tcp, connect_tls
from weir.kv.movers.pull import PullFailed, WantedPage
from weir.kv.movers.source import OfferedPage, PageSource, TransferGone
from weir.kv.movers.stream_pull import PagePull, PullHello, PullLimits
from weir.runtime.authority import issue_public, make_authority
from weir.testing.stack import wait_until

PAGE_BYTES = 20_000
NUM_PAGES = 40
IDLE_S = 0.5
HELLO = PullHello(b"t" * 16, Attempt(3, 1), b"k" * 16)
SERVER_NAME = "transfer.test"


@dataclass
class Faults:
    """What becomes of what the source sends: the first so many bytes go through on each connection."""

    cut_after: list[int] = field(default_factory=list)
    """One a connection; behind the last one all is well."""
    flip_at: set[int] = field(default_factory=set)
    """Offsets in all that is sent."""
    num_sent: int = 0


class FaultyPipe:
    """A pipe of the source's."""

    def __init__(self, pipe: PagePipe, faults: Faults) -> None:
        self._pipe = pipe
        self._faults = faults
        self._left = faults.cut_after.pop(0) if faults.cut_after else 1 << 60

    def send(self, buffers: Sequence[Buffer]) -> None:
        raw = bytearray(b"".join(buffers))
        for offset in self._faults.flip_at:
            if 0 <= offset - self._faults.num_sent < len(raw):
                raw[offset - self._faults.num_sent] ^= 4
        self._faults.num_sent += len(raw)
        self._pipe.send([raw[: self._left]])
        if self._left < len(raw):
            self._pipe.end()
            raise PipeEnded("cut")
        self._left -= len(raw)

    def receive(self, *buffers: memoryview) -> None:
        self._pipe.receive(*buffers)

    def end(self) -> None:
        self._pipe.end()

    def close(self) -> None:
        self._pipe.close()


class World:
    """A memory with pages, offered, and another one that wants them."""

    def __init__(self, open_pipe: Callable[[socket.socket, float], PagePipe], connect: Callable[[int], PagePipe]):
        self.pages = np.random.default_rng(3).integers(0, 256, (NUM_PAGES, PAGE_BYTES), np.uint8)
        self.generations = np.arange(NUM_PAGES) + 7
        self.received: NDArray[np.uint8] = np.zeros_like(self.pages)
        self.faults = Faults()
        self.source = PageSource(self.page, lambda page_id: int(self.generations[page_id]))
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.listener = PageStreamListener(
            self.source,
            "127.0.0.1",
            open_pipe=lambda connection, idle_s: FaultyPipe(open_pipe(connection, idle_s), self.faults),
            idle_s=IDLE_S,
        )
        self._connect = connect

    def page(self, page_id: int) -> memoryview:
        assert self.may_go_on.wait(20)
        page: NDArray[np.uint8] = self.pages[page_id]
        return page.data

    def offer(self, page_ids: Sequence[int]) -> list[OfferedPage]:
        self.source.offer(HELLO.transfer_id, HELLO.attempt, HELLO.ticket)
        return self.source.append(HELLO.transfer_id, page_ids)

    def pull(self, hello: PullHello = HELLO, timeout_s: float = 20.0, limits: PullLimits | None = None) -> PagePull:
        limits = limits or PullLimits(window_bytes=6 * PAGE_BYTES)
        connect = self._connect
        return PagePull(hello, PAGE_BYTES, lambda _: connect(self.listener.port), limits, time.monotonic() + timeout_s)

    def wanted(self, offered: Sequence[OfferedPage], first: int = 0) -> list[WantedPage]:
        """Into the place of the same number."""
        return [
            WantedPage(first + number, page.generation, page.checksum, InPlace(self.received[first + number].data))
            for number, page in enumerate(offered)
        ]


@contextmanager
def tcp(tmp_path: Path) -> Iterator[World]:
    del tmp_path
    world = World(TcpPipe, lambda port: connect_tcp("127.0.0.1", port, 5.0, IDLE_S))
    try:
        yield world
    finally:
        world.listener.close()


@contextmanager
def tls(tmp_path: Path) -> Iterator[World]:
    make_authority(tmp_path)
    pair = issue_public(tmp_path, (SERVER_NAME,), days=1)
    inside, outside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=tmp_path / "ca.pem")
    for context in (inside, outside):
        context.load_cert_chain(pair.cert, pair.key)
    inside.load_verify_locations(tmp_path / "ca.pem")
    inside.verify_mode = ssl.CERT_REQUIRED

    def open_pipe(connection: socket.socket, idle_s: float) -> PagePipe:
        return TlsPipe(inside.wrap_socket(connection, server_side=True), idle_s)

    world = World(open_pipe, lambda port: connect_tls("127.0.0.1", port, 5.0, IDLE_S, outside, SERVER_NAME))
    try:
        yield world
    finally:
        world.listener.close()


@pytest.fixture(params=[tcp, tls], ids=["tcp", "tls"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with request.param(tmp_path) as made:
        yield made


ORDER = [31, 4, 17, 0, *range(20, 30)]


def test_the_pages_that_are_wanted_come_as_they_were_offered(world: World) -> None:
    offered = world.offer(ORDER)
    pull = world.pull()
    pull.want(world.wanted(offered))
    figures = pull.finish()
    assert (world.received[: len(ORDER)] == world.pages[ORDER]).all()
    assert not world.received[len(ORDER) :].any()
    assert (figures.num_pages, figures.num_bytes) == (len(ORDER), len(ORDER) * PAGE_BYTES)
    assert (figures.num_wrong, figures.num_breaks) == (0, 0)
    assert world.source.num_pages_sent == len(ORDER)


def test_pages_that_are_appended_while_others_come_come_too_and_each_once(world: World) -> None:
    pull, sent = world.pull(limits=PullLimits(num_streams=3, window_bytes=2 * PAGE_BYTES)), 0
    world.source.offer(HELLO.transfer_id, HELLO.attempt, HELLO.ticket)
    for first in range(0, NUM_PAGES, 8):
        offered = world.source.append(HELLO.transfer_id, range(first, first + 8))
        pull.want(world.wanted(offered, first))
        sent += len(offered)
        time.sleep(0.02)
    assert pull.finish().num_pages == sent == NUM_PAGES
    assert (world.received == world.pages).all()
    assert world.source.num_pages_sent == NUM_PAGES


def test_nothing_comes_that_was_not_asked_for(world: World) -> None:
    offered = world.offer(range(NUM_PAGES))
    pull = world.pull()
    pull.want(world.wanted(offered)[5:7])
    assert pull.finish().num_pages == 2
    assert world.source.num_pages_sent == 2


def test_where_nothing_is_wanted_nobody_connects(world: World) -> None:
    assert world.pull().finish().num_pages == 0


@pytest.mark.parametrize("offsets", [[10], [HEADER_BYTES], [PAGE_BYTES], [3 * PAGE_BYTES + 5, 0, 70]])
def test_what_a_broken_stream_did_not_bring_comes_by_the_next(world: World, offsets: list[int]) -> None:
    world.faults.cut_after = list(offsets)
    offered = world.offer(ORDER)
    pull = world.pull(limits=PullLimits(num_streams=1))  # else it may be another one that breaks, unused
    pull.want(world.wanted(offered))
    figures = pull.finish()
    assert (world.received[: len(ORDER)] == world.pages[ORDER]).all()
    assert (figures.num_pages, figures.num_breaks) == (len(ORDER), len(offsets))


def test_a_stream_that_breaks_again_and_again_fails_the_pull(world: World) -> None:
    world.faults.cut_after = [0] * 50
    pull = world.pull()
    pull.want(world.wanted(world.offer(ORDER)))
    with pytest.raises(PullFailed, match=r"its stream broke 4 times, the last time since"):
        pull.finish()


@pytest.mark.parametrize("place", [HEADER_BYTES + 5, HEADER_BYTES + PAGE_BYTES - 1])
def test_bytes_that_changed_on_their_way_are_asked_for_once_more(world: World, place: int) -> None:
    frame = HEADER_BYTES + PAGE_BYTES
    world.faults.flip_at = {place, place + 2 * frame}
    pull = world.pull()
    pull.want(world.wanted(world.offer(ORDER)))
    figures = pull.finish()
    assert (world.received[: len(ORDER)] == world.pages[ORDER]).all()
    assert (figures.num_wrong, figures.num_breaks, world.source.num_pages_sent) == (2, 0, len(ORDER) + 2)


def test_a_header_that_changed_on_its_way_ends_the_stream_and_no_page_is_lost(world: World) -> None:
    world.faults.flip_at = {HEADER_BYTES + PAGE_BYTES + 30}
    pull = world.pull()
    pull.want(world.wanted(world.offer(ORDER)))
    assert pull.finish().num_breaks == 1
    assert (world.received[: len(ORDER)] == world.pages[ORDER]).all()


def test_a_page_that_is_another_one_now_is_never_taken_for_what_was_offered(world: World) -> None:
    offered = world.offer(ORDER)
    world.generations[17] += 1
    pull = world.pull()
    pull.want(world.wanted(offered))
    with pytest.raises(PullFailed, match="page 2 of the offer is not there any more"):
        pull.finish()
    assert world.source.num_pages_gone == 1


def test_a_page_that_was_written_after_its_offer_is_found_by_its_checksum(world: World) -> None:
    offered = world.offer(ORDER)
    world.pages[17, 5] ^= 1
    pull = world.pull()
    pull.want(world.wanted(offered))
    with pytest.raises(PullFailed, match="page 2 of the offer came 2 times with another checksum"):
        pull.finish()
    assert pull.figures.num_wrong == 2


@pytest.mark.parametrize(
    "hello",
    [
        PullHello(b"u" * 16, HELLO.attempt, HELLO.ticket),
        PullHello(HELLO.transfer_id, Attempt(3, 0), HELLO.ticket),
        PullHello(HELLO.transfer_id, HELLO.attempt, b"x" * 16),
    ],
    ids=["transfer", "attempt", "ticket"],
)
def test_who_does_not_know_an_offer_gets_nothing_of_it(world: World, hello: PullHello) -> None:
    offered = world.offer(ORDER)
    pull = world.pull(hello)
    pull.want(world.wanted(offered))
    with pytest.raises(PullFailed, match="its stream broke 4 times"):
        pull.finish()
    assert world.source.num_pages_sent == 0
    assert not world.received.any()


def test_an_offer_that_is_withdrawn_ends_its_streams(world: World) -> None:
    offered = world.offer(ORDER)
    pull = world.pull()
    pull.want(world.wanted(offered))
    pull.finish()
    pull = world.pull()
    pull.want(world.wanted(offered)[:1])
    while not pull.figures.num_pages:
        time.sleep(0.01)
    world.source.withdraw(HELLO.transfer_id)
    world.source.withdraw(HELLO.transfer_id)
    pull.want(world.wanted(offered)[1:2])
    with pytest.raises(PullFailed, match="its stream broke 4 times"):
        pull.finish()
    with pytest.raises(TransferGone):
        world.source.append(HELLO.transfer_id, [1])


def test_after_a_cancel_nobody_writes_into_the_pages(world: World) -> None:
    world.offer(range(NUM_PAGES))
    offered = world.offer(range(NUM_PAGES))
    pull = world.pull()
    pull.want(world.wanted(offered))
    while not pull.figures.num_pages:
        time.sleep(0.001)
    assert pull.cancel()
    before = world.received.copy()
    time.sleep(0.05)
    assert (world.received == before).all()
    with pytest.raises(PullFailed, match="cancelled"):
        pull.finish()


def test_a_cancel_does_not_wait_for_a_source_that_is_stuck(tmp_path: Path) -> None:
    with tcp(tmp_path) as world:
        offered = world.offer(ORDER)
        world.may_go_on.clear()
        port, limits = world.listener.port, PullLimits()
        pull = PagePull(
            HELLO, PAGE_BYTES, lambda _: connect_tcp("127.0.0.1", port, 5.0, 60.0), limits, time.monotonic() + 60
        )
        pull.want(world.wanted(offered))
        wait_until(lambda: bool(world.source._offers[HELLO.transfer_id].pipes), timeout_s=10, what="it is let in")
        assert pull.cancel()
        world.may_go_on.set()


def test_a_source_that_is_stuck_costs_no_more_than_the_time_of_the_pull(world: World) -> None:
    offered = world.offer(ORDER)
    world.may_go_on.clear()
    pull = world.pull(timeout_s=1.0)
    pull.want(world.wanted(offered))
    with pytest.raises(PullFailed, match=r"its time was over|its stream broke"):
        pull.finish()
    world.may_go_on.set()


def test_a_pause_in_which_nothing_is_wanted_breaks_nothing(world: World) -> None:
    offered = world.offer(ORDER)
    pull = world.pull(limits=PullLimits(max_breaks=0, rest_s=IDLE_S / 2))
    for page in world.wanted(offered)[:2]:
        pull.want([page])
        time.sleep(2 * IDLE_S)
    assert pull.finish().num_breaks == 0


def test_a_listener_that_is_closed_ends_its_streams_and_lets_nobody_in(world: World) -> None:
    offered = world.offer(ORDER)
    pull = world.pull()
    pull.want(world.wanted(offered)[:1])
    while not pull.figures.num_pages:
        time.sleep(0.01)
    world.listener.close()
    world.listener.close()
    pull.want(world.wanted(offered)[1:2])
    with pytest.raises(PullFailed):
        pull.finish()


def test_streams_that_are_too_many_are_closed_at_once(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = stack.enter_context(tcp(tmp_path))
        few = PageStreamListener(world.source, "127.0.0.1", idle_s=20.0, max_streams=2)
        stack.callback(few.close)
        connections = [stack.enter_context(socket.create_connection(("127.0.0.1", few.port))) for _ in range(3)]
        connections[2].settimeout(10)
        assert connections[2].recv(1) == b""
        connections[0].close()
        wait_s = time.monotonic() + 10
        while time.monotonic() < wait_s:
            with socket.create_connection(("127.0.0.1", few.port)) as again:
                again.settimeout(0.2)
                try:
                    assert again.recv(1) == b""
                except TimeoutError:
                    return  # it is let in
        pytest.fail("a place that was left is not given to anybody")


def test_who_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    with tcp(tmp_path) as world, socket.create_connection(("127.0.0.1", world.listener.port)) as silent:
        silent.settimeout(10)
        assert silent.recv(1) == b""


def test_random_bytes_at_the_port_are_answered_with_nothing(tmp_path: Path) -> None:
    with tcp(tmp_path) as world:
        world.offer(ORDER)
        for num_bytes in (1, 63, 64, 4096):
            with socket.create_connection(("127.0.0.1", world.listener.port)) as hostile:
                hostile.settimeout(10)
                hostile.sendall(os.urandom(num_bytes))
                with suppress(ConnectionResetError):
                    assert hostile.recv(1) == b""
