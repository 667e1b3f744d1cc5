"""Certificates of an authority of the tests, and channels that are made of them."""

from collections.abc import Iterable, Sequence
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
    """An authority in `folder`, whose certificates are one a role and instance unless asked for more. `ca` is the file
    that everybody trusts. One that is there already goes on."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        """`host`: where clients find gateways, beside localhost."""
        self.folder = folder
        self.ca = folder / "trusted.pem"
        self._host = host
        if not self.ca.exists():
            self.ca.write_bytes(make_authority(folder).cert.read_bytes())

    def renew(self, instance: str, roles: Iterable[str]) -> None:
        """Certificates of these roles, and the one for clients."""
        for role in roles:
            self.member(role, instance, force=True)
        self.public(force=True)

    def add_authority(self) -> None:
        """A new one signs from now on; the old one is trusted beside it until `drop_authorities`."""
        make_authority(self.folder, force=True)
        replace_file(self.ca, authority_pair(self.folder).cert.read_bytes() + self.ca.read_bytes())

    def drop_authorities(self) -> None:
        """All but the newest."""
        replace_file(self.ca, authority_pair(self.folder).cert.read_bytes())

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
            return issue_public(self.folder, ("localhost", self._host), days=_DAYS, force=force)
        return pair

    # What a cluster asks for.

    def flags(self, role: str, instance: str) -> Sequence[str]:
        pair = self.member(role, instance)
        flags = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--tls-ca", str(self.ca))
        if role != "gateway":
            return flags
        public = self.public()
        return (*flags, "--public-tls-cert", str(public.cert), "--public-tls-key", str(public.key))

    def open(self, address: str, role: str, instance: str) -> grpc.Channel:
        """As a gateway of this instance; to a gateway as a client."""
        if role == "gateway":
            return grpc.secure_channel(address, grpc.ssl_channel_credentials(self.ca.read_bytes()))
        return self.channel(address, role, instance, self.member("gateway", instance))

    def channel(self, address: str, role: str, instance: str, pair: Pair | None) -> grpc.Channel:
        """To a process of this role, as whoever `pair` is; None: as nobody."""
        party: Party = "worker" if role in ("prefill", "decode") else ROLES[role]  # type: ignore[assignment]
        return open_channel(address, dns_name_of(party, instance), self.ca, pair)


def replace_file(path: Path, content: bytes) -> None:
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(content)
    unfinished.replace(path)


def open_channel(address: str, server_name: str, ca: Path, pair: Pair | None) -> grpc.Channel:
    own = (None, None) if pair is None else (pair.key.read_bytes(), pair.cert.read_bytes())
    options = [("grpc.ssl_target_name_override", server_name), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca.read_bytes(), *own), options=options)
