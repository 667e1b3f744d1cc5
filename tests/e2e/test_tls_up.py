"""`weir up` with a certificate for clients."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from weir.runtime.authority import authority_pair, issue_public, make_authority
from weir.testing.stack import Stack

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_authority(folder)
    return authority_pair(folder).cert


@pytest.fixture(scope="module")
def certified(ca: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    public = issue_public(ca.parent, ("localhost", "127.0.0.1"))
    flags = ("--public-tls-cert", str(public.cert), "--public-tls-key", str(public.key))
    with Stack(tmp_path_factory.mktemp("run"), flags=flags) as stack:
        yield stack


def test_clients_come_by_tls_and_the_commands_of_its_user_find_everything(certified: Stack, ca: Path) -> None:
    asked = ("generate", "--temperature", "0", "--max-tokens", "4", "The sky is", "--address", certified.grpc_address)
    answered = certified.weir(*asked, "--ca", str(ca))
    assert answered.returncode == 0, answered.stderr
    plain = certified.weir(*asked, "--timeout-s", "5")
    assert plain.returncode != 0
    assert all(process.state == "ready" for process in certified.processes())
    assert certified.status()["endpoints"]["OpenAI"] == f"https://127.0.0.1:{certified.http_port}/v1"
    traced = certified.weir("trace", "--last", "--instance", certified.instance, "--ca", str(ca))
    assert traced.returncode == 0, traced.stderr
    bench = ("bench", "serve", "--num-prompts", "2", "--random-input-len", "8", "--random-output-len", "4")
    for backend, url in (("openai", certified.status()["endpoints"]["OpenAI"][:-3]), ("grpc", certified.grpc_address)):
        done = certified.weir(*bench, "--backend", backend, "--base-url", url, "--ca", str(ca))
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_file_that_is_no_authority_is_named(certified: Stack, tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("nothing")
    for command in (("generate", "a"), ("trace", "--last", "--instance", certified.instance)):
        done = certified.weir(*command, "--ca", str(tmp_path / "x.pem"))
        assert done.returncode == 2, done.stderr
        assert f"--ca {tmp_path / 'x.pem'}" in done.stderr.replace("\n", "")
