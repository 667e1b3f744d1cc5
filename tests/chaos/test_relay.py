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
from tests.chaos.relay import Direction, Relay, tcp_ports_of
from tests.chaos.stream_faults import FlipBit, Repeat, Reset, Stall, Truncate

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


def test_cut_in_one_direction_the_other_goes_on() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Relay(*listener.getsockname()) as relay,
        connect(relay) as client,
        listener.accept()[0] as server,
    ):
        server.settimeout(5)
        relay.cut("to_client")
        server.sendall(b"down")
        client.sendall(b"up")
        assert server.recv(1024) == b"up"
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1024)
        relay.restore()
        client.settimeout(5)
        assert client.recv(1024) == b"down"


def test_bytes_are_damaged_in_the_direction_that_is_named_and_once(relay: Relay) -> None:
    relay.damage("to_server", FlipBit(1), Repeat(3))
    relay.damage("to_client", FlipBit(4))
    with connect(relay) as client:
        for sent, echoed in ((b"aaa", b"`aa`"), (b"aaa", b"aaa")):
            client.sendall(sent)
            received = b""
            while len(received) < len(echoed):
                received += client.recv(1024)
            assert received == echoed


def test_faults_that_are_still_to_come_do_not_when_it_is_restored(relay: Relay) -> None:
    relay.damage("to_server", FlipBit(2))
    relay.restore()
    with connect(relay) as client:
        client.sendall(b"aaa")
        assert client.recv(1024) == b"aaa"


def test_a_truncated_answer_ends_for_its_client_and_the_server_does_not_notice() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, Relay(*listener.getsockname()) as relay:
        relay.damage("to_client", Truncate(3))
        with connect(relay) as client, listener.accept()[0] as server:
            server.settimeout(5)
            server.sendall(b"answer")
            assert client.recv(1024) + client.recv(1024) == b"ans"
            server.settimeout(0.1)
            for _ in range(3):
                server.sendall(b"more")
                with pytest.raises(TimeoutError):
                    server.recv(1024)
            client.sendall(b"and?")
            assert server.recv(1024) == b"and?"


@pytest.mark.parametrize("direction", ["to_client", "to_server"])
def test_a_reset_connection_ends_for_both_after_its_byte(direction: Direction) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, Relay(*listener.getsockname()) as relay:
        relay.damage(direction, Reset(3))
        with connect(relay) as client, listener.accept()[0] as server:
            sender, receiver = (server, client) if direction == "to_client" else (client, server)
            sender.sendall(b"abcdef")
            for end, heard in ((receiver, b"abc"), (sender, b"")):
                end.settimeout(5)
                with contextlib.suppress(ConnectionResetError):
                    assert heard.startswith(end.recv(3))
                    assert end.recv(1) == b""


def test_a_stalled_connection_stays_open_beside_others_and_goes_on_when_restored(relay: Relay) -> None:
    relay.damage("to_client", Stall(2))
    with connect(relay) as stalled, connect(relay) as other:
        stalled.sendall(b"echo")
        assert stalled.recv(1024) == b"ec"
        stalled.settimeout(0.3)
        with pytest.raises(TimeoutError):
            stalled.recv(1024)
        other.sendall(b"other")
        assert other.recv(1024) == b"other"
        relay.restore()
        stalled.settimeout(5)
        assert stalled.recv(1024) == b"ho"


def test_what_a_server_sent_before_it_closed_arrives_whole_at_a_client_that_is_slow() -> None:
    """Of some lengths a part waits in the relay when the server has gone: the kernel holds as much, and no more."""
    num_held = _num_bytes_held_by_kernel()
    with socket.create_server(("127.0.0.1", 0)) as listener, Relay(*listener.getsockname()) as relay:
        for num_bytes in range(num_held - (256 << 10), num_held + (256 << 10), 32 << 10):
            with _slow_client(relay.port) as client:
                server, _ = listener.accept()
                with server:
                    server.sendall(bytes(num_bytes))
                time.sleep(0.05)
                num_received = 0
                while data := client.recv(1 << 20):
                    num_received += len(data)
                assert num_received == num_bytes


def _slow_client(port: int) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(5)
    client.connect(("127.0.0.1", port))
    return client


def _num_bytes_held_by_kernel() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener, _slow_client(listener.getsockname()[1]):
        sender, _ = listener.accept()
        with sender:
            sender.setblocking(False)
            num_bytes = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    num_bytes += sender.send(bytes(1 << 16))
            return num_bytes


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
