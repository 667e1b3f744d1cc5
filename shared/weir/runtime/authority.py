"""An authority of one's own and its certificates, in a folder: for a lab, or until there is a real one.

    FOLDER/ca.pem, ca.key             the authority; whoever has its key can be anybody
    FOLDER/ROLE-NAME.pem, .key        one process' certificate and key
    FOLDER/public-NAME.pem, .key      what clients see

Keys are EC P-256, in files of mode 0600. Nothing is overwritten unless it is asked for; what is, is replaced whole, the
key before the certificate, and whoever watches them finds a pair that does not fit at worst for a moment.
"""

import contextlib
import ipaddress
import os
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from weir.core.errors import WeirError
from weir.rpc.identities import CertifiedIdentity

CA_DAYS = 90
LEAF_DAYS = 7
_BACKDATED = timedelta(minutes=5)
"""For clocks that are behind."""


class AuthorityError(WeirError):
    """Files that are there already, or that are no authority."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Where a certificate and its key are."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class ShownCertificate:
    """What a certificate says. Times are seconds since 1970."""

    subject: str
    issuer: str
    names: tuple[str, ...]
    begins_at_s: float
    expires_at_s: float
    key: str


def authority_pair(folder: Path) -> Pair:
    return Pair(folder / "ca.pem", folder / "ca.key")


def make_authority(folder: Path, *, days: float = CA_DAYS, force: bool = False) -> Pair:
    """Raises AuthorityError, OSError."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"Weir authority {secrets.token_hex(4)}")  # another name each, so that two can be trusted at once
    builder = _builder(name, name, key, days).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    builder = builder.add_extension(_key_usage(signs=True), critical=True)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _write(authority_pair(folder), _sign(builder, key), key, force=force)


def issue_member(
    folder: Path,
    identity: CertifiedIdentity,
    *,
    days: float = LEAF_DAYS,
    force: bool = False,
    out: Path | None = None,
    stem: str = "",
) -> Pair:
    """The certificate of one process of a stack, into `out`, else `folder`. `stem`: of the files' names; empty:
    ROLE-NAME. Raises AuthorityError, OSError."""
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri), x509.DNSName(identity.dns_name)]
    stem = stem or f"{identity.role}-{identity.name}"
    return _issue(folder, (out or folder) / stem, f"{identity.role} {identity.name}", names, days, force=force)


def issue_public(
    folder: Path,
    hosts: tuple[str, ...],
    *,
    days: float = LEAF_DAYS,
    force: bool = False,
    out: Path | None = None,
    stem: str = "",
) -> Pair:
    """What clients see, who call it by these host names and addresses. Raises as `issue_member`."""
    if not hosts:
        raise AuthorityError("a certificate for clients needs a host name or address at least")
    stem = stem or f"public-{hosts[0].replace(':', '-')}"
    return _issue(folder, (out or folder) / stem, hosts[0], list(map(_general_name, hosts)), days, force=force)


def read_certificate(path: Path) -> ShownCertificate:
    """Raises AuthorityError, OSError."""
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise AuthorityError(f"{path}: no certificate in PEM ({error})") from error
    try:
        named = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        named = x509.SubjectAlternativeName([])
    key = found.public_key()
    return ShownCertificate(
        found.subject.rfc4514_string(),
        found.issuer.rfc4514_string(),
        tuple(str(name.value) for name in named),
        found.not_valid_before_utc.timestamp(),
        found.not_valid_after_utc.timestamp(),
        f"EC {key.curve.name}" if isinstance(key, ec.EllipticCurvePublicKey) else type(key).__name__.strip("_"),
    )


def _issue(
    folder: Path, stem: Path, common_name: str, names: list[x509.GeneralName], days: float, *, force: bool
) -> Pair:
    ca, ca_key = _read_authority(folder)
    _check_lasts(ca, days, folder)
    key = ec.generate_private_key(ec.SECP256R1())
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    builder = (
        _builder(_name(common_name[:64]), ca.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(issuer, critical=False)
    )
    pair = Pair(stem.with_name(f"{stem.name}.pem"), stem.with_name(f"{stem.name}.key"))
    pair.cert.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _write(pair, _sign(builder, ca_key), key, force=force)


def _check_lasts(ca: x509.Certificate, days: float, folder: Path) -> None:
    """Raises AuthorityError for a certificate that would outlive its authority: it would be of no use then."""
    if datetime.now(UTC) + timedelta(days=days) > ca.not_valid_after_utc:
        raise AuthorityError(
            f"{days:g} days: the authority itself ends on {ca.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; take fewer, or "
            f"make a new one: weir certs ca {folder} --force"
        )


def _read_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    pair = authority_pair(folder)
    try:
        cert = x509.load_pem_x509_certificate(pair.cert.read_bytes())
        key = load_pem_private_key(pair.key.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise AuthorityError(f"{folder}: no authority ({error}); make one: weir certs ca {folder}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
        raise AuthorityError(f"{pair.key}: is not the EC key of {pair.cert}")
    return cert, key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(identifier, critical=False)
    )


def _sign(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise AuthorityError(f"host {host!r}: no host name or address ({error})") from error


def _write(pair: Pair, cert: bytes, key: ec.EllipticCurvePrivateKey, *, force: bool) -> Pair:
    taken = [str(path) for path in (pair.cert, pair.key) if path.exists()]
    if taken and not force:
        raise AuthorityError(f"{' and '.join(taken)}: there already; --force replaces what is there")
    replace_file(pair.key, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    replace_file(pair.cert, cert, 0o644)
    return pair


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """As a whole: a reader sees the old one or the new one. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123 - it is a descriptor
            file.write(content)
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            unfinished.unlink()
        raise
