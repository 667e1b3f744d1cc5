"""Who a process of a stack is, as its certificate says.

    spiffe://TRUST-DOMAIN/weir/INSTANCE/ROLE/NAME    a URI, by which servers know who calls
    PARTY.INSTANCE.weir.internal                     a DNS name, by which clients know whom they have reached

A party is what a client looks for: a worker may be of either role, and change it. NAME is the host, or whatever else
tells the holders of a role apart.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

CertifiedRole = Literal["transfer", "scheduler", "prefill", "decode", "gateway", "operator"]
CERTIFIED_ROLES: tuple[CertifiedRole, ...] = get_args(CertifiedRole)
Party = Literal["transfer", "scheduler", "worker", "gateway", "operator"]

_PARTIES: Mapping[CertifiedRole, Party] = {
    "transfer": "transfer",
    "scheduler": "scheduler",
    "gateway": "gateway",
    "operator": "operator",
}
"""Of roles that are not workers'."""

DEFAULT_TRUST_DOMAIN = "weir.internal"
_DNS_SUFFIX = "weir.internal"
_URI = re.compile(r"spiffe://([a-z0-9._-]{1,255})/weir/([a-z0-9-]{1,40})/([a-z]{1,20})/([A-Za-z0-9._-]{1,253})")
_INSTANCE = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_TRUST_DOMAIN = re.compile(r"[a-z0-9._-]{1,255}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")
_MARK_DIGITS = 16


@dataclass(frozen=True, slots=True)
class CertifiedIdentity:
    """What the URI of a certificate says. Raises ValueError, naming the field, for what can stand in none."""

    instance: str
    role: CertifiedRole
    name: str
    trust_domain: str = DEFAULT_TRUST_DOMAIN

    def __post_init__(self) -> None:
        check_certified_instance(self.instance)
        if self.role not in CERTIFIED_ROLES:
            raise ValueError(f"role {self.role!r}: must be one of {', '.join(CERTIFIED_ROLES)}")
        if not _NAME.fullmatch(self.name) or self.name in (".", ".."):
            raise ValueError(f"name {self.name!r}: use 1 to 253 characters of A-Z a-z 0-9 . _ -")
        if not _TRUST_DOMAIN.fullmatch(self.trust_domain):
            raise ValueError(f"trust_domain {self.trust_domain!r}: use 1 to 255 characters of a-z 0-9 . _ -")

    @property
    def uri(self) -> str:
        return f"spiffe://{self.trust_domain}/weir/{self.instance}/{self.role}/{self.name}"

    @property
    def party(self) -> Party:
        return _PARTIES.get(self.role, "worker")

    @property
    def dns_name(self) -> str:
        return dns_name_of(self.party, self.instance)

    @property
    def mark(self) -> str:
        """Hex digits that stand for it at the end of an id which nobody else may use."""
        return hashlib.sha256(self.uri.encode()).hexdigest()[:_MARK_DIGITS]

    def owns(self, process_id: str) -> bool:
        """Whether an id that is made with its mark is its own."""
        return process_id.endswith(self.mark)


def try_parse_identity(uri: str) -> CertifiedIdentity | None:
    """None for a URI that names no process of Weir."""
    found = _URI.fullmatch(uri)
    if found is None:
        return None
    trust_domain, instance, role, name = found.groups()
    known = next((one for one in CERTIFIED_ROLES if one == role), None)
    try:
        return None if known is None else CertifiedIdentity(instance, known, name, trust_domain)
    except ValueError:
        return None


def check_certified_instance(instance: str) -> None:
    """Raises ValueError: it is a part of a DNS name, where case says nothing."""
    if not _INSTANCE.fullmatch(instance):
        raise ValueError(f"instance {instance!r}: in certificates use 1 to 40 characters of a-z 0-9 -, no - at an end")


def dns_name_of(party: Party, instance: str) -> str:
    return f"{party}.{instance}.{_DNS_SUFFIX}"
