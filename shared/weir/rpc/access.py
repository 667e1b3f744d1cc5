"""Who may call which method at which port: one table, and what is not in it is refused.

    call ─> RpcAccess.check ─> the table's kind of callers ─> the check that this process has for them
            at every port      no entry: refused              none: refused

Kinds are words, and each process knows what they mean for it: the gateway asks its rules of access who is a tenant or
an operator, the leading scheduler its limits. Where a kind is served by a port but nobody said how to tell it, nobody
is let in. The table of the HTTP port lies beside its frontend, `weir_gateway.frontends.http_access`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import unquote

import grpc.aio
from google.protobuf import descriptor_pool

from weir.core.addresses import is_loopback
from weir.core.credentials import try_read_key
from weir.core.errors import PermissionDenied
from weir.core.shares import NOBODY, Holder
from weir.rpc.identities import CERTIFIED_ROLES, CertifiedIdentity, CertifiedRole, try_parse_identity


class Callers(Enum):
    """Kinds of them."""

    OPEN = "open"
    """Anybody: probes, which have no key. Nothing of anybody's is in the answers."""
    TENANT = "tenant"
    """Who shows a tenant's API key; anybody while nobody has one."""
    OPERATOR = "operator"
    """Who shows an operator's key, once anybody has a key."""
    PEER = "peer"
    """A process of the stack: this user's, by a socket in a folder of its own, or who has a certificate of a role that
    may call the method, where the stack has certificates. Without them: whoever reaches the port."""
    HERE = "here"
    """A process of this host."""


class Port(Enum):
    """Kinds of gRPC ports."""

    PUBLIC = "the port for clients"
    """The gateway's."""
    INNER = "a port of the stack"
    """Of every other process."""


_Entry = tuple[Callers | None, Callers | None]
_OPEN, _TENANT, _OPERATOR, _PEER, _HERE = Callers

_REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
RPC_CALLERS: Mapping[str, _Entry] = {
    # method                               at the port for clients, at those of the stack; None: it is not served there
    "weir.v1.Inference/Generate": (_TENANT, None),
    "weir.v1.Inference/Chat": (_TENANT, None),
    "weir.v1.Inference/Cancel": (_TENANT, None),
    "weir.v1.Inference/Tokenize": (_TENANT, None),
    "weir.v1.Inference/ListModels": (_TENANT, None),
    "weir.v1.Admin/Describe": (_OPERATOR, _PEER),
    "weir.v1.Admin/ListSteps": (_OPERATOR, _PEER),
    "weir.v1.Admin/MapPages": (_OPERATOR, _PEER),
    "weir.v1.Admin/ListWorkers": (_OPERATOR, _OPERATOR),
    "weir.v1.Admin/Drain": (_OPERATOR, _OPERATOR),
    "weir.v1.Admin/EndDrain": (_OPERATOR, _OPERATOR),
    "weir.v1.Admin/SetRole": (_OPERATOR, _OPERATOR),
    "weir.v1.Admin/SetLimits": (_OPERATOR, _OPERATOR),
    "weir.v1.Scheduling/DescribeScheduling": (None, _OPERATOR),
    "weir.v1.Scheduling/SetLimits": (None, _OPERATOR),
    "weir.v1.Scheduling/TuneLimits": (None, _OPERATOR),
    "weir.v1.Scheduling/SetPolicy": (None, _OPERATOR),
    "weir.v1.Worker/Serve": (None, _PEER),
    "weir.v1.Arena/Attach": (None, _HERE),
    "weir.v1.Arena/Acquire": (None, _HERE),
    "weir.v1.Arena/Match": (None, _HERE),
    "weir.v1.Arena/Seal": (None, _HERE),
    "weir.v1.Arena/Release": (None, _HERE),
    "weir.v1.Arena/HandOff": (None, _HERE),
    "weir.v1.Arena/Stage": (None, _HERE),
    "weir.v1.Pages/Offer": (None, _PEER),
    "weir.v1.Pages/OfferSequence": (None, _PEER),
    "weir.v1.Pages/Confirm": (None, _PEER),
    "grpc.health.v1.Health/Check": (_OPEN, _OPEN),
    "grpc.health.v1.Health/List": (_OPEN, _OPEN),
    "grpc.health.v1.Health/Watch": (_OPEN, _OPEN),
    **{f"{name}/ServerReflectionInfo": (_OPERATOR, _PEER) for name in _REFLECTION},
}

_ASKING: frozenset[CertifiedRole] = frozenset({"gateway", "operator"})
CERTIFIED_CALLERS: Mapping[str, frozenset[CertifiedRole]] = {
    # method, at a port of the stack: the roles whose certificates admit to it; who is an operator shows a key besides
    **{method: frozenset({"operator"}) for method, (_, inner) in RPC_CALLERS.items() if inner is _OPERATOR},
    "weir.v1.Worker/Serve": frozenset({"gateway"}),
    "weir.v1.Pages/Offer": frozenset({"transfer"}),
    "weir.v1.Pages/OfferSequence": frozenset({"transfer"}),
    "weir.v1.Pages/Confirm": frozenset({"transfer"}),
    "weir.v1.Admin/Describe": frozenset(CERTIFIED_ROLES),  # figures alone, which a host's supervisor asks by theirs
    "weir.v1.Admin/ListSteps": _ASKING,
    "weir.v1.Admin/MapPages": _ASKING,
    **{f"{name}/ServerReflectionInfo": frozenset({"operator"}) for name in _REFLECTION},
}


@dataclass(frozen=True, slots=True)
class RpcCaller:
    """What a call says of who makes it. `peer`: as gRPC writes the address. `identity`: that of its certificate."""

    method: str
    key: str | None
    peer: str
    identity: CertifiedIdentity | None = None

    @classmethod
    def of(cls, method: str, context: "grpc.aio.ServicerContext[Any, Any]") -> "RpcCaller":
        """`method` with or without the slash before it."""
        return cls(method.removeprefix("/"), shown_key(context), context.peer(), identity_of(context))

    @property
    def is_by_socket(self) -> bool:
        """By one of this host's file system, where the kernel has seen to who may."""
        return self.peer.partition(":")[0] == "unix"

    @property
    def is_here(self) -> bool:
        """By a socket of this host's file system, or its loopback interface."""
        kind, _, where = self.peer.partition(":")
        return self.is_by_socket or (kind in ("ipv4", "ipv6") and is_loopback(unquote(where).rpartition(":")[0]))


CheckCaller = Callable[[RpcCaller], Holder | None]
"""Whose tenant's share of the port a call takes; None: nobody's. Raises WeirError for who is not let in."""


class RpcAccess:
    """The checks of one port."""

    def __init__(self, port: Port, table: Mapping[str, _Entry] = RPC_CALLERS) -> None:
        self.port = port
        self._column = 0 if port is Port.PUBLIC else 1
        self._table = table
        self._checks: dict[Callers, CheckCaller] = {Callers.OPEN: _let_in, Callers.HERE: _check_here}
        self._own: CertifiedIdentity | None = None
        self._on_denied: Callable[[RpcCaller], None] | None = None
        if port is Port.INNER:
            self._checks[Callers.PEER] = _let_in

    def answer(self, callers: Callers, check: CheckCaller) -> None:
        """From now on methods for these callers are answered to who passes."""
        self._checks[callers] = check

    def require_identities(self, own: CertifiedIdentity, on_denied: Callable[[RpcCaller], None]) -> None:
        """From now on who comes by TCP to a port of the stack has a certificate of its instance and of a role that may
        call the method. `on_denied` is told of who has not."""
        if self.port is Port.INNER:
            self._own, self._on_denied = own, on_denied

    def callers_of(self, method: str) -> Callers | None:
        """None: nobody may call it here."""
        entry = self._table.get(method.removeprefix("/"))
        return None if entry is None else entry[self._column]

    def admit(self, method: str, context: "grpc.aio.ServicerContext[Any, Any]") -> Holder:
        """As `check`, of a call."""
        callers = self.callers_of(method)
        is_certified = self._own is not None and callers is not Callers.OPEN
        if callers is not None and self._checks.get(callers) is _let_in and not is_certified:  # nobody need know
            return NOBODY
        return self.check(RpcCaller.of(method, context))

    def check(self, caller: RpcCaller) -> Holder:
        """Whose room the call takes. Raises WeirError for who is not let in."""
        callers = self.callers_of(caller.method)
        if callers is None:
            raise PermissionDenied(
                f"{caller.method[:200]}: has no entry for {self.port.value} in the table of who may call what "
                "(weir.rpc.access), so nobody may"
            )
        check = self._checks.get(callers)
        if check is None:
            raise PermissionDenied(
                f"{caller.method[:200]}: is for {callers.value}s, whom this process does not know: ask the "
                f"{'gateway' if callers is Callers.TENANT else 'leading scheduler'}"
            )
        if callers in (Callers.PEER, Callers.OPERATOR):
            self._check_identity(caller)
        return check(caller) or NOBODY

    def _check_identity(self, caller: RpcCaller) -> None:
        own, found = self._own, caller.identity
        if own is None or caller.is_by_socket:
            return
        roles = CERTIFIED_CALLERS.get(caller.method, frozenset())
        is_of_stack = found is not None and (found.instance, found.trust_domain) == (own.instance, own.trust_domain)
        if is_of_stack and found is not None and found.role in roles:
            return
        if self._on_denied is not None:
            self._on_denied(caller)
        wanted = f"a certificate of a {' or '.join(sorted(roles)) or 'role'} of instance {own.instance}"
        shown = "none that names a process of Weir" if found is None else f"that of {found.uri}"
        raise PermissionDenied(f"{caller.method[:200]}: needs {wanted}; this is {shown}")

    def find_missing(self, service_names: Iterable[str]) -> tuple[str, ...]:
        """Methods of these services that nobody may call here. The services' code is loaded already."""
        return tuple(name for name in methods_of(service_names) if self.callers_of(name) is None)


def methods_of(service_names: Iterable[str]) -> Iterator[str]:
    """Each as SERVICE/METHOD. Raises KeyError for a service whose code is not loaded."""
    pool = descriptor_pool.Default()
    for name in service_names:
        for method in pool.FindServiceByName(name).methods:
            yield f"{name}/{method.name}"


def identity_of(context: "grpc.aio.ServicerContext[Any, Any]") -> CertifiedIdentity | None:
    """Of the certificate that the caller has proved to hold; None without one, or for one of others."""
    uris = list(context.auth_context().get("peer_spiffe_id", ()))
    return try_parse_identity(uris[0].decode("ascii", "replace")) if len(uris) == 1 else None


def shown_key(context: "grpc.aio.ServicerContext[Any, Any]") -> str | None:
    """The key that a call carries."""
    headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return try_read_key(headers.get("authorization", ""), headers.get("x-api-key", ""))


def _let_in(caller: RpcCaller) -> None:
    del caller


def _check_here(caller: RpcCaller) -> None:
    if not caller.is_here:
        raise PermissionDenied(
            f"{caller.method[:200]}: is for processes of this host alone; {caller.peer[:80]} is none"
        )
