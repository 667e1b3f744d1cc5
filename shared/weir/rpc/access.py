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


class Callers(Enum):
    """Kinds of them."""

    OPEN = "open"
    """Anybody: probes, which have no key. Nothing of anybody's is in the answers."""
    TENANT = "tenant"
    """Who shows a tenant's API key; anybody while nobody has one."""
    OPERATOR = "operator"
    """Who shows an operator's key, once anybody has a key."""
    PEER = "peer"
    """A process of the stack. Today that is whoever reaches the port: on one machine this user alone, by a socket in a
    folder of its own; across machines they do not prove yet who they are."""
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
    "weir.v1.Scheduling/SetPolicy": (None, _OPERATOR),
    "weir.v1.Worker/Serve": (None, _PEER),
    "weir.v1.Arena/Attach": (None, _HERE),
    "weir.v1.Arena/Acquire": (None, _HERE),
    "weir.v1.Arena/Match": (None, _HERE),
    "weir.v1.Arena/Seal": (None, _HERE),
    "weir.v1.Arena/Release": (None, _HERE),
    "weir.v1.Arena/HandOff": (None, _HERE),
    "grpc.health.v1.Health/Check": (_OPEN, _OPEN),
    "grpc.health.v1.Health/List": (_OPEN, _OPEN),
    "grpc.health.v1.Health/Watch": (_OPEN, _OPEN),
    **{f"{name}/ServerReflectionInfo": (_OPERATOR, _PEER) for name in _REFLECTION},
}


@dataclass(frozen=True, slots=True)
class RpcCaller:
    """What a call says of who makes it. `peer`: as gRPC writes the address."""

    method: str
    key: str | None
    peer: str

    @classmethod
    def of(cls, method: str, context: "grpc.aio.ServicerContext[Any, Any]") -> "RpcCaller":
        """`method` with or without the slash before it."""
        return cls(method.removeprefix("/"), shown_key(context), context.peer())

    @property
    def is_here(self) -> bool:
        """By a socket of this host's file system, or its loopback interface."""
        kind, _, where = self.peer.partition(":")
        if kind == "unix":
            return True
        return kind in ("ipv4", "ipv6") and is_loopback(unquote(where).rpartition(":")[0])


CheckCaller = Callable[[RpcCaller], Holder | None]
"""Whose tenant's share of the port a call takes; None: nobody's. Raises WeirError for who is not let in."""


class RpcAccess:
    """The checks of one port."""

    def __init__(self, port: Port, table: Mapping[str, _Entry] = RPC_CALLERS) -> None:
        self.port = port
        self._column = 0 if port is Port.PUBLIC else 1
        self._table = table
        self._checks: dict[Callers, CheckCaller] = {Callers.OPEN: _let_in, Callers.HERE: _check_here}
        if port is Port.INNER:
            self._checks[Callers.PEER] = _let_in

    def answer(self, callers: Callers, check: CheckCaller) -> None:
        """From now on methods for these callers are answered to who passes."""
        self._checks[callers] = check

    def callers_of(self, method: str) -> Callers | None:
        """None: nobody may call it here."""
        entry = self._table.get(method.removeprefix("/"))
        return None if entry is None else entry[self._column]

    def admit(self, method: str, context: "grpc.aio.ServicerContext[Any, Any]") -> Holder:
        """As `check`, of a call."""
        callers = self.callers_of(method)
        if callers is not None and self._checks.get(callers) is _let_in:  # nobody need know who calls
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
        return check(caller) or NOBODY

    def find_missing(self, service_names: Iterable[str]) -> tuple[str, ...]:
        """Methods of these services that nobody may call here. The services' code is loaded already."""
        return tuple(name for name in methods_of(service_names) if self.callers_of(name) is None)


def methods_of(service_names: Iterable[str]) -> Iterator[str]:
    """Each as SERVICE/METHOD. Raises KeyError for a service whose code is not loaded."""
    pool = descriptor_pool.Default()
    for name in service_names:
        for method in pool.FindServiceByName(name).methods:
            yield f"{name}/{method.name}"


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
