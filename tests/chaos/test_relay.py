"""The relay of the other tests here does what they take for granted."""

import contextlib
import gc
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from tests.chaos.relay import Relay, tcp_ports_of

from weir.testing.stack import wait_until


@pytest.fixture
def relay() -> Iterator[Relay]:
    """To a server that echoes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_echo_for_ever, args=(server,), daemon=True).start()
        with Relay(*server.getsockname()) as relay:
            yield relay


def _echo_for_ever(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    with connection:
        try:
            while data := connection.recv(1024):
                connection.sendall(data)
        except OSError:
            return


def connect(relay: Relay) -> socket.socket:
    return socket.create_connection(("127.0.0.1", relay.port), timeout=5)


def _try_receive(client: socket.socket) -> bytes:
    """Nothing from a connection that is closed or reset."""
    try:
        return client.recv(1024)
    except ConnectionResetError:
        return b""


def test_what_is_sent_while_it_is_cut_arrives_when_it_is_restored(relay: Relay) -> None:
    with connect(relay) as client:
        client.sendall(b"one")
        assert client.recv(1024) == b"one"
        relay.cut()
        client.sendall(b"two")
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1024)
        relay.restore()
        client.settimeout(5)
        assert client.recv(1024) == b"two"


def test_a_delay_is_latency_of_each_message(relay: Relay) -> None:
    relay.delay(0.2)
    with connect(relay) as client:
        began_s = time.monotonic()
        for _ in range(50):
            client.sendall(b"x")
            time.sleep(0.005)
        received = b""
        while len(received) < 50:
            received += client.recv(1024)
        assert 0.4 <= time.monotonic() - began_s < 5, "one after the other they would take 10 s each way"


def test_while_it_refuses_there_is_no_connection_and_none_comes_about(relay: Relay) -> None:
    with connect(relay) as client:
        client.sendall(b"one")
        assert client.recv(1024) == b"one"
        relay.refuse()
        assert _try_receive(client) == b""
    with pytest.raises(ConnectionRefusedError):
        connect(relay)
    relay.restore()
    with connect(relay) as client:
        client.sendall(b"three")
        assert client.recv(1024) == b"three"


def test_one_process_is_cut_off_and_others_are_not(relay: Relay) -> None:
    program = "import socket, sys; c = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
    program += "for line in sys.stdin.buffer: c.sendall(line); sys.stdout.buffer.write(c.recv(9)); sys.stdout.flush()"
    with (
        connect(relay) as own,
        subprocess.Popen(
            [sys.executable, "-c", program, str(relay.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other,
    ):
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(b"one\n")
        other.stdin.flush()
        assert other.stdout.readline() == b"one\n"
        assert relay.cut_off(other.pid) == 1
        own.sendall(b"mine")
        assert own.recv(1024) == b"mine"
        other.stdin.write(b"two\n")
        other.stdin.flush()
        ready, _, _ = select.select([other.stdout], [], [], 0.3)
        assert ready == []
        relay.rejoin(other.pid)
        assert other.stdout.readline() == b"two\n"


def test_a_process_that_is_cut_off_reaches_nobody_by_a_new_connection(relay: Relay) -> None:
    assert relay.cut_off(os.getpid()) == 0
    with connect(relay) as client:
        client.sendall(b"one")
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1024)
        relay.rejoin(os.getpid())
        client.settimeout(5)
        assert client.recv(1024) == b"one"


def test_a_process_that_dies_while_it_is_looked_at_has_no_ports() -> None:
    with subprocess.Popen([sys.executable, "-c", "import socket; socket.create_server(('127.0.0.1', 0))"]) as process:
        while process.poll() is None:
            assert all(port > 0 for port in tcp_ports_of(process.pid))
        assert tcp_ports_of(process.pid) == set()


def test_a_connection_whose_server_has_not_taken_it_yet_is_closed_with_the_relay() -> None:
    """A stopped process with a full backlog: the relay waits for it as long as its client does."""
    with socket.socket() as server, contextlib.ExitStack() as clients:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        filling = [clients.enter_context(socket.socket()) for _ in range(4)]
        for each in filling:
            each.setblocking(False)
            each.connect_ex(server.getsockname())
        with Relay("127.0.0.1", server.getsockname()[1]) as relay:
            client = clients.enter_context(socket.create_connection(("127.0.0.1", relay.port), timeout=10))
            wait_until(lambda: len(relay._serving) == 1, timeout_s=10, what="the relay has taken it")
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
    gc.collect()  # an unclosed transport or socket would warn


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_what_connects_in_the_moment_in_which_it_closes_is_closed_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(30):
            relay = Relay(*server.getsockname())
            clients = [connect(relay) for _ in range(20)]
            relay.close()
            for client in clients:
                client.settimeout(5)
                assert _try_receive(client) == b""
                client.close()
    gc.collect()
