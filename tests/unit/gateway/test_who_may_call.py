"""Every path of the HTTP port and every method of the gRPC port, asked with each kind of key when keys are in force."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health
from starlette.routing import Route
from tests.unit.gateway.fake_scheduler import OPEN_RULES
from tests.unit.gateway.test_access import KEY_A
from tests.unit.gateway.test_recent_requests import GUARDED, OPERATOR
from tests.unit.gateway.test_tenants_at_the_frontends import bearer, write
from tests.unit.gateway.world import INFERENCE, World, open_world, with_batches
from tests.unit.rpc.outcomes import outcome_of

from weir.client import AsyncWeirClient
from weir.core.errors import PermissionDenied, Unauthenticated
from weir.rpc.access import Callers, Port, RpcAccess, methods_of
from weir.runtime.service import COMMON_SERVICES
from weir_gateway.frontends.http_access import HTTP_CALLERS, http_callers_of
from weir_gateway.frontends.http_app import HttpApp
from weir_gateway.frontends.http_frontend import HttpFrontend
from weir_gateway.frontends.http_server import HttpSettings

KEYS = {"nobody": "", "a stranger": "key-of-nobody-at-all", "a tenant": KEY_A, "an operator": OPERATOR}
BY_CALLERS: dict[Callers, dict[str, str]] = {
    Callers.OPEN: dict.fromkeys(KEYS, "let in"),
    Callers.TENANT: {"nobody": "unknown", "a stranger": "unknown", "a tenant": "let in", "an operator": "unknown"},
    Callers.OPERATOR: {"nobody": "unknown", "a stranger": "unknown", "a tenant": "denied", "an operator": "let in"},
}
SERVED = (INFERENCE, *COMMON_SERVICES)


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(with_batches(tmp_path)) as world:
        await write(world, GUARDED)
        yield world


def app_of(world: World, console: Any) -> HttpApp:
    frontend = HttpFrontend(world.gateway.processor, HttpSettings(), lambda: True, world.bodies)
    return frontend.make_app(metrics=cast("Any", SimpleNamespace()), console=console)


def test_every_route_has_an_entry_and_every_entry_a_route(guarded: World) -> None:
    app = app_of(guarded, guarded.gateway.console)
    routes = [
        (method, route.path)
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    ]
    assert [one for one in routes if http_callers_of(*one) is None] == []
    assert len(routes) == len(HTTP_CALLERS)


async def test_each_path_is_for_whom_the_table_says(guarded: World) -> None:
    async with guarded.http_client() as http:
        for (method, path), callers in HTTP_CALLERS.items():
            found = {}
            for who, key in KEYS.items():
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                async with http.stream(method, path.replace("{}", "x"), headers=headers) as answer:
                    found[who] = {401: "unknown", 403: "denied"}.get(answer.status_code, "let in")
                    assert answer.status_code != 405, (method, path)
            assert found == BY_CALLERS[callers], (method, path)


async def test_head_is_for_whom_get_is_and_no_other_method_is_served(guarded: World) -> None:
    methods_at: dict[str, set[str]] = {}
    for method, path in HTTP_CALLERS:
        methods_at.setdefault(path, set()).update({method, "HEAD"} if method == "GET" else {method})
    async with guarded.http_client() as http:
        for path, methods in methods_at.items():
            where = path.replace("{}", "x")
            for method in ("OPTIONS", "PATCH", "TRACE", "PUT", *(() if "HEAD" in methods else ("HEAD",))):
                answer = await http.request(method, where, headers={"Authorization": f"Bearer {OPERATOR}"})
                assert (answer.status_code, answer.headers["Allow"]) == (405, ", ".join(sorted(methods))), (
                    method,
                    path,
                )
            if "HEAD" in methods and not path.endswith("/events"):
                for who, key in KEYS.items():
                    answer = await http.head(where, headers=bearer(key) if key else {})
                    found = {401: "unknown", 403: "denied"}.get(answer.status_code, "let in")
                    assert found == BY_CALLERS[HTTP_CALLERS["GET", path]][who], (who, path)


async def test_each_method_is_for_whom_the_table_says(guarded: World) -> None:
    access = RpcAccess(Port.PUBLIC)
    async with grpc.aio.insecure_channel(guarded.grpc_address) as channel:
        for method in methods_of(SERVED):
            if method.endswith("Health/List"):  # which grpcio's own servicer does not serve
                continue
            callers = access.callers_of(method)
            assert callers is not None, method
            found = {who: await outcome_of(channel, method, key) for who, key in KEYS.items()}
            expected = BY_CALLERS[callers]
            assert found == expected, method


async def test_without_keys_who_asks_from_here_is_told_how_the_gateway_does(world: World) -> None:
    async with AsyncWeirClient(world.grpc_address) as client:
        assert (await client.describe()).role == "gateway"
        await write(world, GUARDED)
        with pytest.raises(Unauthenticated, match="an admin key is needed"):
            await client.describe()
    async with AsyncWeirClient(world.grpc_address, api_key=KEY_A) as client:
        with pytest.raises(PermissionDenied, match="a tenant's key"):
            await client.describe()
    async with AsyncWeirClient(world.grpc_address, api_key=OPERATOR) as client:
        assert (await client.describe()).role == "gateway"
        await write(world, OPEN_RULES)


class _Newcomer:
    """A console with one path too many."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def routes(self) -> list[tuple[str, Any]]:
        async def answer(request: Any) -> None:
            self.asked.append(request.url.path)

        return [("/debug/secrets", answer)]


async def test_a_route_without_an_entry_is_refused_to_everybody_and_told_at_the_start(
    guarded: World, caplog: pytest.LogCaptureFixture
) -> None:
    newcomer = _Newcomer()
    with caplog.at_level(logging.ERROR):
        app = app_of(guarded, newcomer)
    assert "GET /debug/secrets: not in the table" in caplog.text
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        for key in KEYS.values():
            answer = await http.get("/debug/secrets", headers={"X-API-Key": key} if key else {})
            assert answer.status_code == 403
            assert "no entry in the table" in answer.json()["error"]["message"]
    assert newcomer.asked == []


async def test_health_is_the_only_service_that_is_open(guarded: World) -> None:
    del guarded  # who serves it has loaded what reflection is
    access = RpcAccess(Port.PUBLIC)
    assert {m for m in methods_of(SERVED) if access.callers_of(m) is Callers.OPEN} == {
        *methods_of([health.SERVICE_NAME])
    }
