"""A process starts with a certificate of its own alone, and says what is wrong with any other."""

from dataclasses import replace
from pathlib import Path

import pytest

from weir.rpc.identities import CertifiedIdentity, CertifiedRole
from weir.rpc.tls.certificates import CertificateError, CertificateFiles
from weir.runtime.authority import Pair, authority_pair, issue_member, issue_public, make_authority
from weir.runtime.config import ServiceConfig
from weir.runtime.tls import ProcessTls, check_names


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_authority(tmp_path)
    return tmp_path


def config_of(folder: Path, pair: Pair, listen: str = "127.0.0.1:0") -> ServiceConfig:
    ca = str(authority_pair(folder).cert)
    return ServiceConfig(instance="lab", listen=listen, tls_cert=str(pair.cert), tls_key=str(pair.key), tls_ca=ca)


def member(folder: Path, role: CertifiedRole, instance: str = "lab") -> Pair:
    return issue_member(folder, CertifiedIdentity(instance, role, "h"), out=folder / instance, force=True)


@pytest.mark.parametrize(
    ("role", "certified"), [("scheduler", "scheduler"), ("prefill", "decode"), ("decode", "decode")]
)
async def test_its_own_is_taken_and_of_workers_either_roles(folder: Path, role: str, certified: CertifiedRole) -> None:
    tls = ProcessTls(config_of(folder, member(folder, certified)), role)
    assert tls.identity == CertifiedIdentity("lab", certified, "h")
    assert tls.credentials is not None
    assert tls.metrics()["certificate_left_s_tls"] > 0


async def test_a_unix_socket_has_no_tls_but_its_process_reaches_others_by_it(folder: Path) -> None:
    tls = ProcessTls(config_of(folder, member(folder, "gateway"), "unix:/run/weir/a.sock"), "gateway")
    assert tls.credentials is None
    assert tls.dialer.version == 0


@pytest.mark.parametrize(
    ("role", "instance", "said"),
    [
        ("decode", "lab", "is of spiffe://weir.internal/weir/lab/decode/h, not of a scheduler of instance lab"),
        ("scheduler", "other", "not of a scheduler of instance lab"),
    ],
)
def test_another_processs_is_refused(folder: Path, role: CertifiedRole, instance: str, said: str) -> None:
    with pytest.raises(CertificateError, match=said):
        ProcessTls(config_of(folder, member(folder, role, instance)), "scheduler")


def test_one_that_names_no_process_is_refused_with_what_it_should_say(folder: Path) -> None:
    with pytest.raises(CertificateError, match="spiffe://TRUST-DOMAIN/weir/lab/scheduler/NAME"):
        ProcessTls(config_of(folder, issue_public(folder, ("localhost",))), "scheduler")


def test_without_files_there_is_no_tls() -> None:
    tls = ProcessTls(ServiceConfig(), "scheduler")
    assert (tls.identity, tls.credentials, tls.public, tls.http_context) == (None, None, None, None)
    assert tls.metrics() == {}


def test_one_for_clients_that_names_no_host_is_refused(folder: Path) -> None:
    pair = issue_public(folder, ("localhost",))
    found = CertificateFiles(str(pair.cert), str(pair.key), setting="public_tls").load()
    check_names(found)
    with pytest.raises(CertificateError, match="names no host and no address"):
        check_names(replace(found, dns_names=(), addresses=()))
