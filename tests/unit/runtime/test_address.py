"""Unix sockets that two processes want: the first keeps its own, whoever comes and goes."""

import os
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.rpc.server import make_server
from weir.runtime.address import AddressInUse, bind, find_unreachable, reachable_address
from weir.runtime.private_folder import UnsafeFolder, make_own_folder, make_private_folder
from weir.runtime.stack.paths import InstancePaths


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="weir-") as directory:
        yield Path(directory)


@pytest.fixture
async def server() -> AsyncIterator[grpc.aio.Server]:
    made = make_server()
    yield made
    await made.stop(0)


def is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_a_socket_is_there_from_publish_to_withdraw_and_no_other_file(
    folder: Path, server: grpc.aio.Server
) -> None:
    path = folder / "arena.sock"
    listening = bind(server, f"unix:{path}")
    assert not path.exists()
    await server.start()
    listening.publish()
    assert is_answered(path)
    assert names_in(folder) == ["arena.sock"]
    await server.stop(0)
    listening.withdraw()
    assert names_in(folder) == []


async def test_a_second_server_is_refused_and_leaves_the_first_ones_socket(
    folder: Path, server: grpc.aio.Server
) -> None:
    path = folder / "arena.sock"
    first = bind(server, f"unix:{path}")
    await server.start()
    late = make_server()
    second = bind(late, f"unix:{path}")  # nobody can be seen yet
    await late.start()
    first.publish()
    with pytest.raises(AddressInUse, match=r"arena\.sock: in use by another process; stop it"):
        second.publish()
    with pytest.raises(AddressInUse, match="in use by another process"):
        bind(make_server(), f"unix:{path}")
    await late.stop(0)
    second.withdraw()
    assert is_answered(path)
    assert names_in(folder) == ["arena.sock"]


async def test_who_was_replaced_leaves_the_socket_of_his_successor(folder: Path, server: grpc.aio.Server) -> None:
    path = folder / "arena.sock"
    old = make_server()
    first = bind(old, f"unix:{path}")
    await old.start()
    first.publish()
    path.unlink()  # as a clean-up that took it for dead
    second = bind(server, f"unix:{path}")
    await server.start()
    second.publish()
    await old.stop(0)
    first.withdraw()
    assert is_answered(path)


async def test_the_socket_of_a_dead_process_is_replaced(folder: Path, server: grpc.aio.Server) -> None:
    path = folder / "arena.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listening = bind(server, f"unix:{path}")
    await server.start()
    listening.publish()
    assert is_answered(path)


async def test_a_file_that_is_no_socket_is_not_replaced(folder: Path, server: grpc.aio.Server) -> None:
    path = folder / "arena.sock"
    path.write_text("precious")
    with pytest.raises(AddressInUse, match=r"arena\.sock: there is a file that is not a socket; remove it"):
        bind(server, f"unix:{path}")
    assert path.read_text() == "precious"


async def test_what_a_killed_process_had_not_published_is_cleaned_away(folder: Path, server: grpc.aio.Server) -> None:
    paths = InstancePaths(folder / "i")
    paths.make()
    bind(server, f"unix:{paths.arena_socket()}")
    assert len(names_in(paths.folder)) == 3
    paths.remove_volatile()
    assert names_in(paths.folder) == ["logs"]


async def test_each_server_of_a_folder_has_a_socket_of_its_own_there(folder: Path, server: grpc.aio.Server) -> None:
    paths = InstancePaths(folder / "i")
    first = bind(server, paths.sockets)
    second = bind(server, paths.sockets)
    await server.start()
    for listening in (first, second):
        listening.publish()
        assert is_answered(Path(listening.address.removeprefix("unix:")))
    assert first.address != second.address
    assert stat.S_IMODE(paths.folder.stat().st_mode) == 0o700
    first.withdraw()
    assert is_answered(Path(second.address.removeprefix("unix:")))
    paths.make()
    paths.remove_volatile()
    assert names_in(paths.folder) == ["logs"]


@given(mode=st.integers(0, 0o777).filter(lambda mode: mode != 0o700))
def test_a_folder_with_any_other_mode_is_refused(mode: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "run"
        folder.mkdir()
        folder.chmod(mode)
        with pytest.raises(UnsafeFolder, match=rf"run has mode {mode:04o}, must have 0700; `chmod 700 {folder}`"):
            make_private_folder(folder)


def test_a_folder_may_inherit_that_its_content_is_of_its_group(folder: Path) -> None:
    """As folders do that are made in a volume of Kubernetes with an fsGroup."""
    (folder / "run").mkdir()
    (folder / "run").chmod(0o2700)
    make_private_folder(folder / "run")
    (folder / "run").chmod(0o2770)
    with pytest.raises(UnsafeFolder, match="run has mode 0770, must have 0700"):
        make_private_folder(folder / "run")


def test_a_folder_that_is_a_link_or_another_users_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "own").mkdir(mode=0o700)
    (folder / "link").symlink_to(folder / "own")
    with pytest.raises(UnsafeFolder, match="link is a link and not a folder; remove it"):
        make_private_folder(folder / "link")
    monkeypatch.setattr("os.getuid", lambda: os.geteuid() + 1)
    with pytest.raises(UnsafeFolder, match=r"own belongs to another user \(\d+\); set WEIR_RUNTIME_DIR"):
        make_private_folder(folder / "own")


def test_the_folder_of_all_instances_may_be_seen_but_not_written_by_others(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run").chmod(0o755)
    make_own_folder(folder / "run")
    (folder / "run").chmod(0o777)
    with pytest.raises(UnsafeFolder, match=r"run can be written by every user; `chmod o-w"):
        make_own_folder(folder / "run")


async def test_no_socket_is_made_in_a_folder_of_others(folder: Path, server: grpc.aio.Server) -> None:
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    with pytest.raises(UnsafeFolder, match="open has mode 0777"):
        bind(server, f"unix:{folder}/open/arena.sock")
    assert names_in(folder / "open") == []


@pytest.mark.parametrize(
    ("listen", "advertise_host", "address"),
    [
        ("127.0.0.1:0", "", "127.0.0.1:7"),
        ("10.0.0.7:0", "", "10.0.0.7:7"),
        ("0.0.0.0:0", "", f"{socket.gethostname()}:7"),
        ("[::]:0", "", f"{socket.gethostname()}:7"),
        ("0.0.0.0:0", "worker-3.internal", "worker-3.internal:7"),
        ("0.0.0.0:0", "fd00::3", "[fd00::3]:7"),
        ("0.0.0.0:0", "[fd00::3]", "[fd00::3]:7"),
    ],
)
def test_others_reach_a_process_by_what_it_advertises(listen: str, advertise_host: str, address: str) -> None:
    assert reachable_address(listen, 7, advertise_host) == address


@pytest.mark.parametrize(
    ("address", "nats_url", "is_warned"),
    [
        ("127.0.0.1:7", "nats://127.0.0.1:4222", False),
        ("127.0.0.1:7", "nats://localhost:4222", False),
        ("127.0.0.1:7", "nats://127.0.0.1", False),
        ("127.0.0.1:7", "nats://user:p@ss@[::1]:4222", False),
        ("10.0.0.7:7", "nats://nats.internal:4222", False),
        ("127.0.0.1:7", "nats://nats.internal:4222", True),
        ("[::1]:7", "tls://user:secret@10.0.0.1:4222", True),
        ("localhost:7", "nats://10.0.0.1:4222", True),
        ("unix:/run/weir/a.sock", "nats://10.0.0.1:4222", True),
        ("unix:/run/weir/a.sock", "nats://127.0.0.1:4222", False),
    ],
)
def test_a_loopback_address_beside_a_nats_of_another_machine_is_a_warning(
    address: str, nats_url: str, is_warned: bool
) -> None:
    warning = find_unreachable(address, nats_url)
    assert (warning is not None) == is_warned
    assert warning is None or (address in warning and "advertise_host" in warning and "secret" not in warning)
