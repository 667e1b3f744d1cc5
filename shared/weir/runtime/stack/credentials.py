"""What a host of a stack of several proves itself by, in a folder that is its alone.

    ca.pem                          the authority that signed all certificates of the stack
    ROLE.pem, ROLE.key              of its processes of each role
    nats-ROLE.seed                  keys by which NATS knows a process of that role
    operator.pem, .key, admin.key   of the stack's operators, at hosts with schedulers or gateways
    nats.pem, nats.key              of the NATS server, at the host that runs it: with the seeds of all roles

Certificates and keys may be replaced while the host runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weir.bus.nats_users import NATS_ROLES, NatsRole, public_key
from weir.rpc.tls.certificates import CertificateFiles

_NATS_ROLES: Mapping[str, NatsRole] = {role: role for role in NATS_ROLES}
"""Of roles that are not workers'."""


def nats_role_of(role: str) -> NatsRole:
    return _NATS_ROLES.get(role, "worker")


@dataclass(frozen=True, slots=True)
class HostCredentials:
    """Names inside `folder`."""

    folder: Path

    @property
    def authority(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def admin_key(self) -> Path:
        return self.folder / "admin.key"

    @property
    def operator(self) -> CertificateFiles:
        return self.certificate("operator")

    def certificate(self, role: str) -> CertificateFiles:
        cert, key = (str(self.folder / f"{role}.{suffix}") for suffix in ("pem", "key"))
        return CertificateFiles(cert, key, str(self.authority))

    def nats_seed(self, role: NatsRole) -> Path:
        return self.folder / f"nats-{role}.seed"

    def flags_of(self, role: str) -> Mapping[str, object]:
        """Of a process."""
        files = self.certificate(role)
        nats = {"nats-seed-file": self.nats_seed(nats_role_of(role)), "nats-ca-file": self.authority}
        return {**nats, "tls-cert": files.cert, "tls-key": files.key, "tls-ca": files.ca}

    def nats_public_keys(self) -> Mapping[NatsRole, str]:
        """Of the host that runs the server. Raises OSError."""
        return {role: public_key(self.nats_seed(role).read_text()) for role in NATS_ROLES}
