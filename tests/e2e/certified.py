"""Certificates of an authority of the tests, and channels that are made of them."""

from collections.abc import Sequence
from pathlib import Path

import grpc

from weir.rpc.identities import CertifiedIdentity, CertifiedRole, Party, dns_name_of
from weir.runtime.authority import Pair, authority_pair, issue_member, issue_public, make_authority

HOST = "host-1"
_DAYS = 1.0
ROLES: dict[str, CertifiedRole] = {
    "transfer": "transfer",
    "scheduler": "scheduler",
    "prefill": "prefill",
    "decode": "decode",
    "gateway": "gateway",
    "operator": "operator",
}


class Lab:
    """An authority in `folder`, whose certificates are one a role and instance unless asked for more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_authority(folder)

    @property
    def ca(self) -> Path:
        return authority_pair(self.folder).cert

    def member(self, role: str, instance: str, *, name: str = HOST, days: float = _DAYS, force: bool = False) -> Pair:
        folder = self.folder / instance
        pair = Pair(folder / f"{role}-{name}.pem", folder / f"{role}-{name}.key")
        if force or not pair.cert.exists():
            identity = CertifiedIdentity(instance, ROLES[role], name)
            return issue_member(self.folder, identity, days=days, force=force, out=folder)
        return pair

    def public(self, *, force: bool = False) -> Pair:
        pair = Pair(self.folder / "public-localhost.pem", self.folder / "public-localhost.key")
        if force or not pair.cert.exists():
            return issue_public(self.folder, ("localhost", "127.0.0.1"), days=_DAYS, force=force)
        return pair

    # What a cluster asks for.

    def flags(self, role: str, instance: str) -> Sequence[str]:
        pair = self.member(role, instance)
        flags = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--tls-ca", str(self.ca))
        if role != "gateway":
            return flags
        public = self.public()
        return (*flags, "--public-tls-cert", str(public.cert), "--public-tls-key", str(public.key))

    def open(self, address: str, role: str) -> grpc.Channel:
        """As a gateway of the only instance that has certificates; to a gateway as a client."""
        if role == "gateway":
            return grpc.secure_channel(address, grpc.ssl_channel_credentials(self.ca.read_bytes()))
        instance = next(path.name for path in self.folder.iterdir() if path.is_dir())
        return self.channel(address, role, instance, self.member("gateway", instance))

    def channel(self, address: str, role: str, instance: str, pair: Pair | None) -> grpc.Channel:
        """To a process of this role, as whoever `pair` is; None: as nobody."""
        party: Party = "worker" if role in ("prefill", "decode") else ROLES[role]  # type: ignore[assignment]
        return open_channel(address, dns_name_of(party, instance), self.ca, pair)


def open_channel(address: str, server_name: str, ca: Path, pair: Pair | None) -> grpc.Channel:
    own = (None, None) if pair is None else (pair.key.read_bytes(), pair.cert.read_bytes())
    options = [("grpc.ssl_target_name_override", server_name), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca.read_bytes(), *own), options=options)
