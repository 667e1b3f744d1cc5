"""Credentials of all hosts of a stack, made in one place to be copied to each."""

from pathlib import Path

from weir.bus.nats_users import NATS_ROLES, NatsRole, make_seed
from weir.core.credentials import make_key
from weir.rpc.identities import CertifiedIdentity, CertifiedRole
from weir.runtime.authority import authority_pair, issue_member, issue_public, make_authority, replace_file
from weir.runtime.stack.credentials import HostCredentials, nats_role_of
from weir.runtime.stack.hosts_file import HostEntry, Hosts

DAYS = 30.0
"""That certificates are valid for."""


def make_credentials(hosts: Hosts, folder: Path) -> None:
    """FOLDER/NAME for each host, with new certificates; the authority in FOLDER, the keys of NATS and of operators
    stay as they are where they are there already. Raises AuthorityError, OSError."""
    if not authority_pair(folder).cert.exists():
        make_authority(folder)
    seeds = {role: _kept(folder / f"nats-{role}.seed", make_seed()) for role in NATS_ROLES}
    admin_key = _kept(folder / "admin.key", make_key())
    for host in hosts.hosts:
        _make_for(host, hosts, folder, seeds, admin_key)


def _make_for(host: HostEntry, hosts: Hosts, folder: Path, seeds: "dict[NatsRole, str]", admin_key: str) -> None:
    made = HostCredentials(folder / host.name)
    made.folder.mkdir(mode=0o700, exist_ok=True)
    replace_file(made.authority, authority_pair(folder).cert.read_bytes())
    roles = _roles_of(host)
    if host.schedulers or host.gateways:
        roles.append("operator")
        replace_file(made.admin_key, admin_key.encode())
    for role in roles:
        identity = CertifiedIdentity(hosts.instance, role, host.name)
        issue_member(folder, identity, days=DAYS, force=True, out=made.folder, stem=role)
    if host.serve_nats:
        issue_public(folder, (host.address,), days=DAYS, force=True, out=made.folder, stem="nats")
    needed = set(NATS_ROLES) if host.serve_nats else {nats_role_of(role) for role in roles}
    for nats_role in needed:
        replace_file(made.nats_seed(nats_role), seeds[nats_role].encode())


def _roles_of(host: HostEntry) -> list[CertifiedRole]:
    """That have certificates. A worker may take the other role, and keeps its certificate."""
    counts: dict[CertifiedRole, int] = {
        "transfer": host.prefill + host.decode,
        "prefill": host.prefill,
        "decode": host.decode,
        "scheduler": host.schedulers,
        "gateway": host.gateways,
    }
    return [role for role, count in counts.items() if count]


def _kept(path: Path, new: str) -> str:
    if not path.exists():
        replace_file(path, new.encode())
    return path.read_text()
