"""`weir certs`: an authority and what it signs, in files that nobody else reads and that are not lost by mistake."""

import json
import stat
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weir.cli.app import app
from weir.rpc.identities import CertifiedIdentity
from weir.rpc.tls.certificates import CertificateFiles

DAY_S = 86_400.0


def weir(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["certs", *arguments])
    return done.exit_code, done.output.replace("\n", " ")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "certs"
    assert weir("ca", str(folder))[0] == 0
    return folder


def issue(folder: Path, *more: str) -> tuple[int, str]:
    return weir("issue", str(folder), "--role", "decode", "--host", "gpu-1", "--instance", "lab", *more)


def test_what_is_issued_is_what_a_process_takes_and_lasts_days_unless_said(folder: Path) -> None:
    code, printed = issue(folder)
    cert, key = printed.split()
    assert code == 0
    found = CertificateFiles(cert, key, str(folder / "ca.pem")).load()
    assert found.identity == CertifiedIdentity("lab", "decode", "gpu-1")
    assert found.expires_at_s - time.time() == pytest.approx(7 * DAY_S, abs=300)
    assert issue(folder, "--force", "--days", "1")[0] == 0
    renewed = CertificateFiles(cert, key, str(folder / "ca.pem")).load()
    assert renewed.expires_at_s - time.time() == pytest.approx(DAY_S, abs=300)


def test_keys_are_for_their_user_alone(folder: Path) -> None:
    issue(folder)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {"ca.pem": 0o644, "ca.key": 0o600, "decode-gpu-1.pem": 0o644, "decode-gpu-1.key": 0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_nothing_is_overwritten_unless_it_is_asked_for(folder: Path) -> None:
    issue(folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for code, printed in (weir("ca", str(folder)), issue(folder)):
        assert code == 1
        assert "--force" in printed
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_what_clients_see_has_every_name_that_they_use(folder: Path) -> None:
    hosts = ("--host", "llm.example.org", "--host", "10.0.0.7", "--host", "::1")
    code, printed = weir("issue", str(folder), "--role", "public", *hosts)
    assert code == 0, printed
    shown = json.loads(CliRunner().invoke(app, ["certs", "show", printed.split()[0], "--json"]).output)
    assert shown["names"] == ["llm.example.org", "10.0.0.7", "::1"]
    assert shown["key"] == "EC secp256r1"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--role", "decode", "--host", "a", "--host", "b"), 2, "--host"),
        (("--role", "decode", "--host", "a/b"), 2, "name 'a/b'"),
        (("--role", "decode", "--host", "a", "--instance", "A"), 2, "instance 'A'"),
        (("--role", "public", "--host", "bücher"), 1, "host 'bücher'"),
    ],
)
def test_what_cannot_be_issued_is_refused_by_name(
    folder: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    found, printed = weir("issue", str(folder), *arguments)
    assert (found, said in printed) == (code, True), printed
    assert len(list(folder.iterdir())) == 2


def test_without_an_authority_it_says_how_to_make_one(tmp_path: Path) -> None:
    code, printed = issue(tmp_path)
    assert code == 1
    assert f"weir certs ca {tmp_path}" in printed
