"""Certificates from files that change: what cannot be used never is, and what can be is within one look."""

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from weir.rpc.identities import CertifiedIdentity
from weir.rpc.tls.certificates import Certificate, CertificateError, CertificateFiles
from weir.rpc.tls.credentials import HttpsContext
from weir.rpc.tls.watch import CertificateWatch
from weir.runtime import authority
from weir.runtime.authority import AuthorityError, Pair, authority_pair, issue_member, issue_public, make_authority

DAY_S = 86_400.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_authority(tmp_path)
    return tmp_path


@pytest.fixture
def pair(folder: Path) -> Pair:
    return issue_member(folder, CertifiedIdentity("lab", "decode", "h"), days=8)


def files_of(folder: Path, pair: Pair) -> CertificateFiles:
    return CertificateFiles(str(pair.cert), str(pair.key), str(authority_pair(folder).cert))


def renew(folder: Path) -> None:
    issue_member(folder, CertifiedIdentity("lab", "decode", "h"), force=True)


def test_what_a_certificate_says_is_found(folder: Path, pair: Pair) -> None:
    found = files_of(folder, pair).load()
    assert found.identity == CertifiedIdentity("lab", "decode", "h")
    assert found.dns_names == ("worker.lab.weir.internal",)
    assert found.expires_at_s - found.begins_at_s == pytest.approx(8 * DAY_S, abs=400)
    assert "PRIVATE" not in repr(found)


def locked(key: bytes) -> bytes:
    found = serialization.load_pem_private_key(key, None)
    assert isinstance(found, ec.EllipticCurvePrivateKey)
    lock = serialization.BestAvailableEncryption(b"secret")
    return found.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)


SPOILS: dict[str, Callable[[Path, Pair], object]] = {
    "half a key": lambda folder, pair: pair.key.write_bytes(pair.key.read_bytes()[:100]),
    "an empty certificate": lambda folder, pair: pair.cert.write_bytes(b""),
    "half a certificate": lambda folder, pair: pair.cert.write_bytes(pair.cert.read_bytes()[:300]),
    "another's key": lambda folder, pair: pair.key.write_bytes(authority_pair(folder).key.read_bytes()),
    "a key with a password": lambda folder, pair: pair.key.write_bytes(locked(pair.key.read_bytes())),
    "another authority": lambda folder, pair: make_authority(folder, force=True),
    "no authority": lambda folder, pair: authority_pair(folder).cert.write_bytes(b"\xff"),
    "a certificate that has expired": lambda folder, pair: issue_member(
        folder, CertifiedIdentity("lab", "decode", "h"), days=-0.001, force=True
    ),
    "no file": lambda folder, pair: pair.key.unlink(),
    "a file that is too large": lambda folder, pair: pair.key.write_bytes(b"a" * (1 << 21)),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS.keys())
def test_what_cannot_be_used_is_refused_with_the_settings_and_the_file(
    folder: Path, pair: Pair, spoil: Callable[[Path, Pair], object]
) -> None:
    spoil(folder, pair)
    with pytest.raises(CertificateError, match=rf"tls_\w+ {folder}"):
        files_of(folder, pair).load()


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS.keys())
async def test_a_watch_goes_on_with_what_it_has_and_takes_the_next_that_is_whole(
    folder: Path, pair: Pair, spoil: Callable[[Path, Pair], object]
) -> None:
    watch = CertificateWatch(files_of(folder, pair))
    before, changes = watch.current, list[Certificate]()
    authority, kept = authority_pair(folder).cert, authority_pair(folder).cert.read_bytes()
    watch.on_change(changes.append)
    spoil(folder, pair)
    for _ in range(3):
        await watch.look()
    assert (watch.current, watch.version, watch.num_refused, changes) == (before, 0, 1, [])
    if b"BEGIN" not in authority.read_bytes():
        authority.write_bytes(kept)
    renew(folder)
    await watch.look()
    assert watch.version == 1
    assert changes == [watch.current] != [before]


async def test_a_link_that_leads_elsewhere_is_a_change(folder: Path, pair: Pair, tmp_path: Path) -> None:
    """As Kubernetes replaces a secret: ..data leads to another folder."""
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    for name in ("1", "2"):
        renew(folder)
        for file in (pair.cert, pair.key):
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    data = tmp_path / "data"
    data.symlink_to("1")
    mounted = Pair(data / pair.cert.name, data / pair.key.name)
    watch = CertificateWatch(files_of(folder, mounted))
    await watch.look()
    assert watch.version == 0
    (tmp_path / "data.new").symlink_to("2")
    (tmp_path / "data.new").replace(data)
    await watch.look()
    assert watch.version == 1
    assert watch.current.chain_pem == (tmp_path / "2" / pair.cert.name).read_bytes()


async def test_a_listener_that_fails_is_told_again_and_nothing_is_taken_before(folder: Path, pair: Pair) -> None:
    watch = CertificateWatch(files_of(folder, pair))
    told: list[Certificate] = []

    def listen(certificate: Certificate) -> None:
        told.append(certificate)
        if len(told) == 1:
            raise OSError("no descriptors left")

    watch.on_change(listen)
    renew(folder)
    watching = asyncio.create_task(watch.run(0.01))
    async with asyncio.timeout(10):
        while watch.version == 0:  # noqa: ASYNC110 - it goes on looking by itself
            await asyncio.sleep(0.01)
    assert told == [watch.current, watch.current]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_files_of_which_one_is_new_at_a_first_look_are_no_refusal(folder: Path, pair: Pair) -> None:
    watch = CertificateWatch(files_of(folder, pair))
    kept = pair.cert.read_bytes()
    renew(folder)
    renewed = pair.cert.read_bytes()
    pair.cert.write_bytes(kept)
    await watch.look()
    pair.cert.write_bytes(renewed)
    await watch.look()
    assert (watch.version, watch.num_refused) == (1, 0)


def test_with_its_authority_a_certificate_ends_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_authority(tmp_path, days=2)
    holder = CertifiedIdentity("lab", "decode", "h")
    with pytest.raises(AuthorityError, match="3 days: the authority itself ends on"):
        issue_member(tmp_path, holder, days=3)
    monkeypatch.setattr(authority, "_check_lasts", lambda *given: None)  # as others' authorities may
    left_s = files_of(tmp_path, issue_member(tmp_path, holder, days=3)).load().expires_at_s - time.time()
    assert left_s == pytest.approx(2 * DAY_S, abs=400)


async def test_files_that_say_the_same_are_no_change(folder: Path, pair: Pair) -> None:
    watch = CertificateWatch(files_of(folder, pair))
    pair.cert.write_bytes(pair.cert.read_bytes())
    await watch.look()
    assert (watch.version, watch.num_refused) == (0, 0)


async def test_its_end_is_told_from_a_quarter_of_its_life_on_once_an_hour(
    folder: Path, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = files_of(folder, pair).load().begins_at_s
    watch = CertificateWatch(files_of(folder, pair), now_s=lambda: now_s)
    told = []
    for days in (1.0, 5.9, 6.1, 6.11, 6.2, 8.1):
        now_s = watch.current.begins_at_s + days * DAY_S
        caplog.clear()
        await watch.look()
        told.append([record.levelno for record in caplog.records])
    assert told == [[], [], [logging.WARNING], [], [logging.WARNING], [logging.ERROR]]
    assert watch.metrics()["certificate_left_s_tls"] < 0


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> bytes:
    """The certificate that the client sees."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    done = set[ssl.SSLObject]()
    while len(done) < 2:
        for end in ends:
            try:
                end.do_handshake()
                done.add(end)
            except ssl.SSLWantReadError:
                continue
    shown = ends[0].getpeercert(binary_form=True)
    assert shown is not None
    return shown


async def test_an_https_server_shows_the_new_one_and_no_more_the_old_whatever_its_kind_of_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that would rather have the old kind, without a host's name in their hello."""
    public = issue_public(folder, ("localhost",))
    watch = CertificateWatch(CertificateFiles(str(public.cert), str(public.key), setting="public_tls"))
    server = HttpsContext(watch).outer
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    client.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256")
    assert shake_hands(server, client) == ssl.PEM_cert_to_DER_cert(public.cert.read_text())
    monkeypatch.setattr(ec, "generate_private_key", lambda _: rsa.generate_private_key(65537, 2048))
    issue_public(folder, ("localhost",), force=True)
    await watch.look()
    assert watch.version == 1
    assert shake_hands(server, client) == ssl.PEM_cert_to_DER_cert(public.cert.read_text())
