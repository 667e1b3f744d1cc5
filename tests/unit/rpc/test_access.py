"""The table of who may call which method: it names every method that is served and no other, at every kind of port, and
what is not in it is refused."""

import contextlib
import importlib
import pkgutil
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health
from tests.unit.rpc.outcomes import outcome_of

import weir.wire.v1
from weir.core.errors import PermissionDenied, Unauthenticated
from weir.rpc.access import CERTIFIED_CALLERS, RPC_CALLERS, Callers, Port, RpcAccess, RpcCaller, methods_of
from weir.rpc.identities import CERTIFIED_ROLES, CertifiedIdentity
from weir.rpc.reflection import REFLECTION_NAMES, add_reflection
from weir.rpc.server import AccessGuard, ErrorGuard, make_server

OPERATOR = "key-of-an-operator-0"
FILES = [
    importlib.import_module(f"weir.wire.v1.{module.name}")
    for module in pkgutil.iter_modules(weir.wire.v1.__path__)
    if module.name.endswith("_pb2")
]
OWN = [service.full_name for file in FILES for service in file.DESCRIPTOR.services_by_name.values()]
SERVICES = [*OWN, health.SERVICE_NAME, *REFLECTION_NAMES]


def check_operator(caller: RpcCaller) -> None:
    if caller.key is None:
        raise Unauthenticated("show a key")
    if caller.key != OPERATOR:
        raise PermissionDenied("another key")


def inner_access() -> RpcAccess:
    """As the scheduler has it."""
    access = RpcAccess(Port.INNER)
    access.answer(Callers.OPERATOR, check_operator)
    return access


@asynccontextmanager
async def served(access: RpcAccess, methods: Iterable[str], address: str) -> AsyncIterator[grpc.aio.Channel]:
    """Answers each of these methods with nothing."""

    async def answer(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield b""

    server = make_server([AccessGuard(access), ErrorGuard()])
    by_service: dict[str, dict[str, Any]] = {}
    for method in methods:
        service, _, name = method.partition("/")
        by_service.setdefault(service, {})[name] = grpc.stream_stream_rpc_method_handler(answer)
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(service, named) for service, named in by_service.items())
    )
    port = server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address if address.startswith("unix") else f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def test_every_method_of_the_protocol_is_in_the_table_and_no_other() -> None:
    add_reflection([], make_server())  # brings its file along
    assert len(OWN) >= 5
    assert sorted(methods_of(SERVICES)) == sorted(RPC_CALLERS)


async def test_at_a_port_of_the_stack_each_method_is_for_whom_the_table_says(tmp_path: Path) -> None:
    expected: dict[Callers | None, tuple[str, str, str]] = {
        Callers.OPEN: ("let in", "let in", "let in"),
        Callers.PEER: ("let in", "let in", "let in"),
        Callers.HERE: ("let in", "let in", "let in"),
        Callers.OPERATOR: ("unknown", "denied", "let in"),
        None: ("denied", "denied", "denied"),
    }
    access = inner_access()
    async with served(access, RPC_CALLERS, f"unix:{tmp_path}/port.sock") as channel:
        for method in RPC_CALLERS:
            found = [await outcome_of(channel, method, key) for key in ("", "key-of-a-tenant-00", OPERATOR)]
            assert tuple(found) == expected[access.callers_of(method)], method


async def test_a_method_without_an_entry_is_refused_to_everybody() -> None:
    access = inner_access()
    async with served(access, ["weir.v1.Admin/Reboot", "test.New/Do"], "127.0.0.1:0") as channel:
        for method in ("weir.v1.Admin/Reboot", "test.New/Do"):
            assert await outcome_of(channel, method, OPERATOR) == "denied"
    assert RpcAccess(Port.PUBLIC).find_missing(["weir.v1.Worker"]) == ("weir.v1.Worker/Serve",)
    assert access.find_missing(["weir.v1.Worker", "weir.v1.Admin"]) == ()


def test_where_nobody_says_who_is_an_operator_nobody_is() -> None:
    caller = RpcCaller("weir.v1.Admin/Drain", OPERATOR, "ipv4:127.0.0.1:5")
    with pytest.raises(PermissionDenied, match="ask the leading scheduler"):
        RpcAccess(Port.INNER).check(caller)
    inner_access().check(caller)


CERTIFIED = CertifiedIdentity("lab", "decode", "h")
FROM_AFAR = "ipv4:10.0.0.7:51234"


def certified_access(denied: list[RpcCaller]) -> RpcAccess:
    access = inner_access()
    access.require_identities(CERTIFIED, denied.append)
    return access


def test_each_method_for_processes_or_operators_says_which_certificates_admit_to_it() -> None:
    asked = {method for method, (_, inner) in RPC_CALLERS.items() if inner in (Callers.PEER, Callers.OPERATOR)}
    assert CERTIFIED_CALLERS.keys() == asked
    assert CERTIFIED_CALLERS["weir.v1.Worker/Serve"] == {"gateway"}


def test_certificates_admit_to_what_the_table_says_and_to_nothing_else() -> None:
    denied: list[RpcCaller] = []
    access = certified_access(denied)
    for method, roles in CERTIFIED_CALLERS.items():
        for role in CERTIFIED_ROLES:
            caller = RpcCaller(method, OPERATOR, FROM_AFAR, CertifiedIdentity("lab", role, "other"))
            refusal = (
                contextlib.nullcontext() if role in roles else pytest.raises(PermissionDenied, match="certificate")
            )
            with refusal:
                access.check(caller)
            assert (caller in denied) == (role not in roles), caller


@pytest.mark.parametrize(
    "identity",
    [None, CertifiedIdentity("other", "gateway", "h"), CertifiedIdentity("lab", "gateway", "h", "elsewhere")],
)
def test_who_is_of_another_stack_or_nobody_is_denied(identity: CertifiedIdentity | None) -> None:
    with pytest.raises(PermissionDenied, match="instance lab"):
        certified_access([]).check(RpcCaller("weir.v1.Worker/Serve", OPERATOR, FROM_AFAR, identity))


def test_an_operators_certificate_is_not_an_operators_key() -> None:
    identity = CertifiedIdentity("lab", "operator", "h")
    with pytest.raises(Unauthenticated):
        certified_access([]).check(RpcCaller("weir.v1.Admin/Drain", None, FROM_AFAR, identity))


def test_probes_and_who_comes_by_a_socket_of_this_host_need_none() -> None:
    access = certified_access([])
    access.check(RpcCaller("grpc.health.v1.Health/Check", None, FROM_AFAR))
    access.check(RpcCaller("weir.v1.Worker/Serve", None, "unix:"))


@pytest.mark.parametrize(
    ("peer", "is_here"),
    [
        ("unix:", True),
        ("unix:/run/weir/arena.sock", True),
        ("ipv4:127.0.0.1:51234", True),
        ("ipv4:127.9.9.9:1", True),
        ("ipv6:[::1]:51234", True),
        ("ipv6:%5B::1%5D:51234", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:1", True),
        ("ipv4:10.0.0.7:51234", False),
        ("ipv6:%5Bfe80::1%5D:51234", False),
        ("ipv6:%5B::ffff:10.0.0.7%5D:1", False),
        ("vsock:2:1", False),
        ("localhost:1", False),
        ("", False),
    ],
)
def test_who_is_of_this_host(peer: str, is_here: bool) -> None:
    caller = RpcCaller("weir.v1.Arena/Attach", None, peer)
    assert caller.is_here == is_here
    refusal = contextlib.nullcontext() if is_here else pytest.raises(PermissionDenied, match="of this host")
    with refusal:
        RpcAccess(Port.INNER).check(caller)


async def test_a_handler_of_which_nothing_would_be_asked_is_not_served() -> None:
    """A synchronous one, which no guard can wrap."""
    server = make_server([AccessGuard(inner_access())])
    handler: Any = grpc.unary_unary_rpc_method_handler(lambda request, context: b"served")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("weir.v1.Admin", {"Drain": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_unary("/weir.v1.Admin/Drain")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"", timeout=10)
    await server.stop(None)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
