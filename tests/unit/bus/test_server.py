"""Finding a nats-server."""

from pathlib import Path

import pytest

from weir.bus.server import NatsServerMissing, find_nats_server, nats_server_command


def test_the_packaged_server_is_found() -> None:
    found = find_nats_server({})
    assert found.name == "nats-server"
    assert found.is_file()


def test_a_named_server_wins(tmp_path: Path) -> None:
    own = tmp_path / "my-nats"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    assert find_nats_server({"WEIR_NATS_SERVER": str(own)}) == own


def test_a_named_server_that_is_none_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(NatsServerMissing, match=r"WEIR_NATS_SERVER=.*nowhere is not a program"):
        find_nats_server({"WEIR_NATS_SERVER": str(tmp_path / "nowhere")})


def test_the_command_has_the_port_and_the_folder(tmp_path: Path) -> None:
    command = nats_server_command(4333, tmp_path)
    assert command[1:] == ["-a", "127.0.0.1", "-p", "4333", "-js", "-sd", str(tmp_path)]
