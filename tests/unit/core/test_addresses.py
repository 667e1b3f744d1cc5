import gc
import random
import socket
import struct
from contextlib import ExitStack
from pathlib import Path

import pytest

from weir.core.addresses import (
    LOOPBACK,
    NoFreePort,
    PortDealer,
    bare,
    bracketed,
    free_port,
    hold_free_port,
    hold_port,
    is_port_free,
    server_ports,
)

_IP_LOCAL_PORT_RANGE = 51  # of Linux 6.3; Python has no name for it


@pytest.mark.parametrize(
    ("host", "in_an_address", "alone"),
    [
        ("10.0.0.1", "10.0.0.1", "10.0.0.1"),
        ("front", "front", "front"),
        ("::1", "[::1]", "::1"),
        ("[fe80::2]", "[fe80::2]", "fe80::2"),
    ],
)
def test_an_ipv6_address_has_brackets_before_a_port_and_nowhere_else(host: str, in_an_address: str, alone: str) -> None:
    assert (bracketed(host), bare(host)) == (in_an_address, alone)


def kernel_range(folder: Path, text: str) -> Path:
    file = folder / "ip_local_port_range"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("32768\t60999\n", range(10_001, 32_768)),
        ("20000 65535", range(10_001, 20_000)),
        ("1024 60999", range(61_000, 65_536)),
        ("1024 5000", range(10_001, 65_536)),
        ("1024 65535", range(10_001, 65_536)),
        ("10100 64900", range(10_001, 65_536)),
        ("?", range(10_001, 32_768)),
    ],
)
def test_servers_get_ports_that_no_outgoing_connection_gets(text: str, expected: range, tmp_path: Path) -> None:
    assert server_ports(kernel_range(tmp_path, text)) == expected


def test_a_machine_that_does_not_say_its_range_is_taken_for_a_usual_one(tmp_path: Path) -> None:
    assert server_ports(tmp_path / "absent") == range(10_001, 32_768)


def test_an_outgoing_connection_is_never_given_a_port_that_a_server_may_get() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        for _ in range(20):
            with socket.create_connection(server.getsockname()) as connection:
                assert connection.getsockname()[1] not in server_ports()


def test_a_process_is_not_given_a_port_twice() -> None:
    ports = [free_port() for _ in range(200)]
    assert len({*ports}) == 200
    assert {*ports} <= {*server_ports()}


def port_of(holder: socket.socket) -> int:
    port: int = holder.getsockname()[1]
    return port


def unheld_ports(number: int) -> list[int]:
    """That this process has given before, so that nobody is likely to hold them."""
    with ExitStack() as held:
        return [port_of(held.enter_context(hold_free_port())) for _ in range(number)]


def dealer_of(*ports: int) -> PortDealer:
    return PortDealer(ports, random.Random(0))


def test_a_dealer_passes_over_what_is_in_use_and_ends_by_name() -> None:
    free, busy = unheld_ports(2)
    dealer = dealer_of(free, busy)
    with socket.create_server((LOOPBACK, busy)):
        with dealer.deal() as holder:
            assert port_of(holder) == free
        with pytest.raises(NoFreePort, match=r"no port of 127.0.0.1"):
            dealer.deal()


def test_a_port_that_another_program_holds_is_not_dealt() -> None:
    free, held = unheld_ports(2)
    dealer = dealer_of(free, held)
    with hold_port(LOOPBACK, held):
        with dealer.deal() as holder:
            assert port_of(holder) == free
        with pytest.raises(NoFreePort):
            dealer.deal()


def test_two_programs_are_not_dealt_the_same_port() -> None:
    (port,) = unheld_ports(1)
    with dealer_of(port).deal() as holder:
        assert port_of(holder) == port
        with pytest.raises(NoFreePort):
            dealer_of(port).deal()
        with hold_port(LOOPBACK, port), socket.create_server((LOOPBACK, port)):
            pass  # for which it was dealt
    dealer_of(port).deal().close()


def test_a_free_port_stays_held() -> None:
    port = free_port()
    gc.collect()
    with pytest.raises(NoFreePort):
        dealer_of(port).deal()


def test_a_server_starts_and_restarts_at_a_port_that_is_held_for_it() -> None:
    port = free_port()
    with hold_port(LOOPBACK, port):
        for _ in range(2):
            with socket.create_server((LOOPBACK, port)) as server:
                socket.create_connection((LOOPBACK, port)).close()
                server.accept()[0].close()
                assert not is_port_free(LOOPBACK, port)


def test_a_port_that_is_held_is_given_to_no_connection() -> None:
    with socket.create_server((LOOPBACK, 0)) as server, socket.socket() as connection:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            port: int = probe.getsockname()[1]
        try:
            connection.setsockopt(socket.IPPROTO_IP, _IP_LOCAL_PORT_RANGE, struct.pack("I", port | port << 16))
        except OSError:
            pytest.skip("this kernel lets no socket say its range of local ports")
        with hold_port(LOOPBACK, port), pytest.raises(OSError, match="Cannot assign requested address"):
            connection.connect(server.getsockname())
