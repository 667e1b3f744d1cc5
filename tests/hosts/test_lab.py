"""Hosts of a lab have nothing in common but a switch, and what the lab did to them ends with it."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.chaos.stream_faults import FlipBit
from tests.hosts.lab import Host, Lab, needs_hosts
from tests.hosts.namespaces import ROOT

from weir.testing.stack import wait_until

pytestmark = needs_hosts
_TIMEOUT_S = 10.0
_BRIEF_S = 0.3
_MIB = 1 << 20
_CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10)"
_LISTEN = """
import pathlib, socket, sys, time
pathlib.Path("/dev/shm/segment").write_text("pages")
listener = socket.create_server(("", int(sys.argv[1])))
print("listens", flush=True)
kept, _ = listener.accept()
print("accepted", flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture(scope="module")
def a(lab: Lab) -> Host:
    return lab.host("a")


@pytest.fixture(scope="module")
def b(lab: Lab) -> Host:
    return lab.host("b")


def _listen(host: Host, address: str | None = None) -> socket.socket:
    with host.network():
        return socket.create_server((address or host.address, 0))


def _connect(host: Host, address: tuple[str, int]) -> socket.socket:
    with host.network():
        return socket.create_connection(address, _TIMEOUT_S)


@contextmanager
def _connected(client: Host, server: Host) -> Iterator[tuple[socket.socket, socket.socket]]:
    with _listen(server) as listener, _connect(client, listener.getsockname()) as near, listener.accept()[0] as far:
        far.settimeout(_TIMEOUT_S)
        yield near, far


def _hears_nothing(connection: socket.socket) -> bool:
    """For a while, in which it is neither closed nor reset."""
    connection.settimeout(_BRIEF_S)
    try:
        connection.recv(1024)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(_TIMEOUT_S)
    return False


def _start_listener(host: Host, port: int, log: Path) -> "subprocess.Popen[bytes]":
    process = host.start([sys.executable, "-c", _LISTEN, str(port)], log=log)
    wait_until(lambda: "listens" in log.read_text(), timeout_s=_TIMEOUT_S, what="it listens")
    return process


def _processes_in(namespaces: set[str]) -> list[str]:
    """Of this machine, by their networks."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str((process / "ns/net").readlink()) in namespaces:
                found.append((process / "cmdline").read_text())
    return found


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes and (data := connection.recv(num_bytes - len(received))):
        received += data
    return received


def _network_of(host: Host) -> str:
    return host.run("readlink", "/proc/1/ns/net").strip()


def _switch_of(lab: Lab) -> str:
    return str(Path(f"/proc/{lab._switch.pid}/ns/net").readlink())


# What hosts have in common


def test_hosts_reach_each_other_by_name_and_by_address(a: Host, b: Host) -> None:
    with _listen(a) as listener:
        port = str(listener.getsockname()[1])
        for known_as in ("a", a.address):
            b.run(sys.executable, "-c", _CONNECT, known_as, port)
            listener.settimeout(_TIMEOUT_S)
            connection, (came_from, _) = listener.accept()
            connection.close()
            assert came_from == b.address
    assert (a.run("hostname"), b.run("hostname")) == ("a\n", "b\n")


def test_what_listens_on_the_loopback_of_one_is_reached_by_no_other(a: Host, b: Host) -> None:
    with _listen(a, "127.0.0.1") as listener:
        port = listener.getsockname()[1]
        _connect(a, ("127.0.0.1", port)).close()
        for host, address in ((b, "127.0.0.1"), (b, a.address), (a, a.address)):
            with pytest.raises(ConnectionRefusedError):
                _connect(host, (address, port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), _TIMEOUT_S)


@pytest.mark.parametrize("folder", ["/dev/shm", "/tmp", "/run"])
def test_a_file_in_memory_of_one_is_not_there_for_another_nor_outside(a: Host, b: Host, folder: str) -> None:
    file = f"{folder}/of-one-host-{os.getpid()}"
    a.run("touch", file)
    assert a.run("ls", file) == f"{file}\n"
    with pytest.raises(RuntimeError, match="No such file"):
        b.run("ls", file)
    assert not Path(file).exists()


def test_a_disk_is_at_the_same_place_inside_and_outside_and_no_other_host_has_it(a: Host, b: Host) -> None:
    a.run("sh", "-c", f"echo kept > {a.disk}/file")
    assert (a.disk / "file").read_text() == "kept\n"
    if a.disk.is_relative_to("/tmp"):
        with pytest.raises(RuntimeError, match="No such file"):
            b.run("ls", str(a.disk))


def test_memory_for_files_is_as_large_as_asked_for(lab: Lab) -> None:
    small = lab.host("small", shm_bytes=_MIB)
    small.run("head", "-c", str(_MIB), "/dev/zero")
    with pytest.raises(RuntimeError, match="No space left"):
        small.run("sh", "-c", f"head -c {_MIB + 1} /dev/zero > /dev/shm/file")


def test_a_process_is_seen_by_its_host_alone_where_pid_1_is_the_hosts_own(a: Host, b: Host, tmp_path: Path) -> None:
    running = a.start(["sleep", "1000"], log=tmp_path / "log")
    look = ("sh", "-c", "cat /proc/[0-9]*/comm")
    wait_until(lambda: "sleep" in a.run(*look).split(), timeout_s=_TIMEOUT_S, what="it runs")
    assert set(b.run(*look).split()) == {"cat", "sh"}
    assert a.run("cat", "/proc/1/comm") == "cat\n"
    running.send_signal(signal.SIGTERM)
    assert running.wait(_TIMEOUT_S) == -signal.SIGTERM


def test_a_process_whose_parent_is_gone_leaves_nothing_when_it_ends(a: Host) -> None:
    a.run("sh", "-c", "sleep 0.01 & exit 0")
    look = ("sh", "-c", "cat /proc/[0-9]*/stat 2> /dev/null | grep '(sleep)' || true")
    wait_until(lambda: a.run(*look) == "", timeout_s=_TIMEOUT_S, what="nothing is left of it")


def test_commands_run_in_the_checkout_and_their_failure_is_told(a: Host) -> None:
    assert a.run("pwd") == f"{ROOT}\n"
    assert a.run("sh", "-c", "echo $WORD", env={"WORD": "said"}) == "said\n"
    with pytest.raises(RuntimeError, match=r"a: .* ended with 3:\nwhy"):
        a.run("sh", "-c", "echo why >&2; exit 3")
    with pytest.raises(subprocess.TimeoutExpired):
        a.run("sleep", "1000", timeout_s=0.1)


def test_two_labs_at_once_do_not_meet(a: Host, tmp_path: Path) -> None:
    with Lab(tmp_path) as other, _listen(a) as listener:
        twin, stranger = other.host("a"), other.host("b")
        assert twin.address == a.address
        with pytest.raises(ConnectionRefusedError):
            _connect(stranger, listener.getsockname())


# What can happen to a link


def test_a_shaped_link_carries_no_more_than_its_rate_in_both_directions(a: Host, b: Host) -> None:
    a.shape(rate_mbit=80)
    for client, server in ((a, b), (b, a)):
        with _connected(client, server) as (near, far):
            began_s = time.monotonic()
            sending = threading.Thread(target=near.sendall, args=(bytes(8 * _MIB),))
            sending.start()
            assert len(_receive(far, 8 * _MIB)) == 8 * _MIB
            sending.join(_TIMEOUT_S)
            assert time.monotonic() - began_s > 0.5, "at 80 Mbit/s it takes 0.8 s"
    a.unshape()
    assert "tbf" not in a.run("tc", "qdisc", "show", "dev", "eth0")


def test_while_its_link_is_cut_a_host_hears_nothing_and_connections_go_on_when_it_is_mended(a: Host, b: Host) -> None:
    with _connected(a, b) as (near, far):
        a.cut()
        near.sendall(b"up")
        far.sendall(b"down")
        assert _hears_nothing(far)
        assert _hears_nothing(near)
        a.mend()
        assert (far.recv(1024), near.recv(1024)) == (b"up", b"down")


def test_cut_in_one_direction_and_from_one_host_the_rest_goes_on(lab: Lab, a: Host, b: Host) -> None:
    c = lab.host("c")
    with _connected(a, b) as (near, far), _connected(a, c) as (near_c, far_c):
        a.cut(to=b)
        far.sendall(b"down")
        assert near.recv(1024) == b"down"
        near.sendall(b"up")
        assert _hears_nothing(far)
        near_c.sendall(b"beside")
        assert far_c.recv(1024) == b"beside"
        a.mend(to=b)
        assert far.recv(1024) == b"up"


def test_a_relay_between_hosts_cuts_and_damages_what_passes_through_it(lab: Lab, a: Host, b: Host) -> None:
    with _listen(b) as listener:
        relay = lab.relay(b, listener.getsockname()[1])
        host, _, port = relay.address.partition(":")
        relay.damage("to_server", FlipBit(at_byte=2))
        with _connect(a, (host, int(port))) as near, listener.accept()[0] as far:
            far.settimeout(_TIMEOUT_S)
            near.sendall(b"aaa")
            assert _receive(far, 3) == b"a`a"
            relay.cut("to_client")
            far.sendall(b"down")
            assert _hears_nothing(near)
            relay.restore()
            assert near.recv(1024) == b"down"
            a.cut()
            a.run("ip", "neighbour", "flush", "dev", "eth0")  # it asks anew where the relay is, and nobody answers
            near.sendall(b"up")
            assert _hears_nothing(far)
            a.mend()
            assert far.recv(1024) == b"up"


# What happens when power goes


def test_without_power_all_of_a_host_is_gone_at_once_and_nobody_is_told(lab: Lab, b: Host, tmp_path: Path) -> None:
    mortal, log = lab.host("mortal"), tmp_path / "log"
    process = _start_listener(mortal, 7000, log)
    stopped = mortal.start(["sleep", "1000"], log=tmp_path / "stopped.log")
    stopped.send_signal(signal.SIGSTOP)
    (mortal.disk / "file").write_text("kept")
    network = _network_of(mortal)
    with _connect(b, (mortal.address, 7000)) as near:
        wait_until(lambda: "accepted" in log.read_text(), timeout_s=_TIMEOUT_S, what="it has the connection")
        mortal.power_off()
        assert _processes_in({network}) == []
        assert (process.poll(), stopped.poll()) == (-signal.SIGKILL, -signal.SIGKILL)
        assert _hears_nothing(near)
        with pytest.raises(RuntimeError, match="host mortal is off"):
            mortal.run("true")
        mortal.power_on()
        near.sendall(b"are you still there?")
        with pytest.raises(ConnectionResetError):
            near.recv(1024)
    assert mortal.run("ls", "/dev/shm") == ""
    assert mortal.run("cat", "/proc/sys/kernel/hostname", f"{mortal.disk}/file") == "mortal\nkept"
    with pytest.raises(ConnectionRefusedError):
        _connect(b, (mortal.address, 7000))
    _start_listener(mortal, 7000, tmp_path / "again.log")
    b.run(sys.executable, "-c", _CONNECT, "mortal", "7000")


# What is left


def _leave_nothing_of(namespaces: set[str], folder: Path) -> None:
    wait_until(lambda: _processes_in(namespaces) == [], timeout_s=_TIMEOUT_S, what="its processes are gone")
    assert str(folder) not in Path("/proc/self/mounts").read_text()
    named = Path("/run/netns")
    kept = [file.stat().st_ino for file in named.iterdir()] if named.exists() else []
    assert not {f"net:[{inode}]" for inode in kept} & namespaces
    assert not [*Path("/sys/class/net").glob("port*"), *Path("/sys/class/net").glob("switch")]


def test_nothing_is_left_of_a_lab_that_ended_by_an_exception(tmp_path: Path) -> None:
    with suppress(InterruptedError), Lab(tmp_path) as lab:
        host, off = lab.host("a"), lab.host("off")
        off.power_off()
        process = host.start(["sh", "-c", _IMMORTAL], log=tmp_path / "log")
        relay = lab.relay(host, 1)
        namespaces = {_network_of(host), _switch_of(lab)}
        wait_until(lambda: len(_processes_in(namespaces)) == 4, timeout_s=_TIMEOUT_S, what="its processes run")
        raise InterruptedError
    assert process.poll() == -signal.SIGKILL
    assert not relay._thread.is_alive()
    assert _processes_in(namespaces) == []
    _leave_nothing_of(namespaces, tmp_path)


def test_a_host_that_cannot_be_made_is_told_and_the_lab_ends_as_ever(tmp_path: Path) -> None:
    with Lab(tmp_path) as lab:
        namespaces = {_switch_of(lab)}
        with pytest.raises(RuntimeError, match=r"namespaces were not made.*tmpfs"):
            lab.host("a", shm_bytes=-1)
    _leave_nothing_of(namespaces, tmp_path)


_IMMORTAL = "trap '' TERM INT HUP; sleep 1000 & wait"
_HOLD_A_LAB = """
import pathlib, signal, sys, time
from tests.hosts.lab import Lab
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have had ignored
folder = pathlib.Path(sys.argv[1])
with Lab(folder) as lab:
    host = lab.host("a")
    host.start(["sh", "-c", sys.argv[2]], log=folder / "log")
    print(host.run("readlink", "/proc/1/ns/net"), end="", flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_nothing_is_left_of_a_lab_whose_process_was_ended(tmp_path: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-c", _HOLD_A_LAB, str(tmp_path), _IMMORTAL]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe) as holder:
        assert holder.stdout is not None
        namespaces = {holder.stdout.readline().decode().strip()}
        wait_until(lambda: len(_processes_in(namespaces)) == 3, timeout_s=_TIMEOUT_S, what="its processes run")
        holder.send_signal(how)
        holder.communicate(timeout=_TIMEOUT_S)
    _leave_nothing_of(namespaces, tmp_path)
