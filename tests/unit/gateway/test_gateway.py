"""The gateway as a component of its process: what it needs to start, and how it describes itself."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest
import uvicorn
from opentelemetry.trace import NoOpTracerProvider
from tests.unit.gateway.fake_model import byte_model

from weir.bus.in_memory import InMemoryHub
from weir.bus.protocol import Bus, BusUnavailable
from weir.core.errors import Unavailable
from weir.model.errors import ModelNotFound
from weir.model.files.digest import model_digest
from weir.model.files.source import resolve_model
from weir.rpc.body_budget import BodyBudget
from weir.runtime.config import ConfigError, read_config
from weir_gateway.config import GatewayConfig
from weir_gateway.driving.adoption import AdoptionSettings
from weir_gateway.frontends.event_stream import StreamSettings
from weir_gateway.gateway import GatewayComponent, GatewayLoaders, GatewayProcess
from weir_gateway.requests.models import ServedModel, load_model_of, load_served_model
from weir_gateway.settings import GatewaySettings


def make_component(
    config: GatewayConfig,
    *,
    hub: InMemoryHub | None = None,
    model: ServedModel | None = None,
    request_shutdown: Callable[[str], None] = lambda reason: None,
) -> GatewayComponent:
    async def connect() -> Bus:
        if hub is None:
            raise BusUnavailable("no NATS server answers")
        return hub.connect()

    def load_model() -> ServedModel:
        return model or load_served_model("no/such/model.gguf")

    tracer, bodies = NoOpTracerProvider().get_tracer("test"), BodyBudget(config.max_bodies_bytes)
    process = GatewayProcess("gateway-0-00000000", tracer, bodies, request_shutdown)
    return GatewayComponent(process, GatewaySettings.of(config), GatewayLoaders(connect, lambda: [load_model()]))


@asynccontextmanager
async def stopped_at_the_end(component: GatewayComponent) -> AsyncIterator[GatewayComponent]:
    try:
        yield component
    finally:
        await component.stop()


async def test_a_started_component_serves_http_and_describes_itself() -> None:
    asked: list[str] = []
    config = GatewayConfig(http_port=0, scheduler_wait_s=0.1)
    component = make_component(config, hub=InMemoryHub(), model=byte_model(), request_shutdown=asked.append)
    async with stopped_at_the_end(component):
        with pytest.raises(Unavailable, match="not ready yet"):
            _ = component.gateway
        assert component.describe().metrics == {}
        await component.start()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{component.gateway.http_port}") as http:
            assert (await http.get("/health")).status_code == 200
        described = component.describe()
        assert described.integrity_errors == ()
        assert described.metrics["requests_in_flight"] == described.metrics["accepted_total"] == 0
        assert component.gateway.processor.models.list_models()[0].name == "bytes"
        await component.drain(1)
    assert asked == []


async def test_without_a_bus_it_does_not_start_and_names_the_reason() -> None:
    component = make_component(GatewayConfig(http_port=0), model=byte_model())
    async with stopped_at_the_end(component):
        with pytest.raises(Unavailable, match="no NATS server answers"):
            await component.start()


async def test_without_the_models_files_it_does_not_start_and_names_what_would_help() -> None:
    component = make_component(GatewayConfig(http_port=0), hub=InMemoryHub())
    async with stopped_at_the_end(component):
        with pytest.raises(ModelNotFound, match=r"no model 'no/such/model.gguf'.*weir pull"):
            await component.start()


async def test_an_http_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        component = make_component(
            GatewayConfig(http_port=port, scheduler_wait_s=0.1), hub=InMemoryHub(), model=byte_model()
        )
        async with stopped_at_the_end(component):
            with pytest.raises(Unavailable, match=f"HTTP cannot listen on 127.0.0.1:{port} .*--http-port"):
                await component.start()


async def _broken(server: uvicorn.Server, counter: int) -> bool:
    raise RuntimeError("a defect of the HTTP server")


async def _over(server: uvicorn.Server, counter: int) -> bool:
    return True


@pytest.mark.parametrize("tick", [_broken, _over], ids=["with an error", "quietly"])
async def test_an_http_server_that_ends_by_itself_ends_the_process(
    tick: Callable[[uvicorn.Server, int], Awaitable[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: asyncio.Queue[str] = asyncio.Queue()
    config = GatewayConfig(http_port=0, scheduler_wait_s=0.1)
    component = make_component(config, hub=InMemoryHub(), model=byte_model(), request_shutdown=asked.put_nowait)
    async with stopped_at_the_end(component):
        await component.start()
        monkeypatch.setattr(uvicorn.Server, "on_tick", tick)
        async with asyncio.timeout(10):
            assert await asked.get() == "the HTTP server ended"
    assert asked.empty()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--http-port", "70000"], "http_port 70000"),
        (["--max-requests", "0"], "max_requests 0"),
        (["--default-max-tokens", "0"], "default_max_tokens 0"),
        (["--scheduler-wait-s", "-1"], "scheduler_wait_s -1.0"),
        (["--no-progress-s", "nan"], "no_progress_s nan"),
        (["--adopter-wait-s", "31"], r"adopter_wait_s 31.0: must be in \[0, 30\]"),
        (["--claim-wait-s", "nan"], r"claim_wait_s nan: must be in \[0, 3600\]"),
        (["--http-host", ""], "http_host is empty"),
    ],
)
def test_a_bad_setting_is_named_with_its_flag(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        read_config(GatewayConfig, flags, environ={})
    assert flags[0] in refused.value.message


def test_how_long_it_looks_for_a_sequence_is_set_by_the_environment_too() -> None:
    config = read_config(GatewayConfig, [], environ={"WEIR_ADOPTER_WAIT_S": "0", "WEIR_CLAIM_WAIT_S": "30"})
    assert (config.adopter_wait_s, config.claim_wait_s) == (0, 30)
    assert GatewaySettings.of(GatewayConfig()).adoption == AdoptionSettings()


def test_every_setting_reaches_the_part_that_it_is_for() -> None:
    config = GatewayConfig(
        max_requests=7, default_max_tokens=8, max_prompt_bytes=9, scheduler_wait_s=10, max_queue_s=11,
        no_progress_s=12, worker_lost_s=13, send_timeout_s=14, http_host="::1", http_port=15, instance="other",
        adopter_wait_s=16, claim_wait_s=17, sse_keep_alive_s=18, after_stream_error="done", unknown_fields="refuse",
        max_prompts=19,
    )  # fmt: skip
    settings = GatewaySettings.of(config)
    assert (settings.driver.max_requests, settings.driver.max_queue_s, settings.driver.no_progress_s) == (7, 11, 12)
    assert (settings.limits.default_max_tokens, settings.limits.max_prompt_bytes) == (8, 9)
    assert (settings.port.outage_s, settings.access_wait_s, settings.connections.lost_after_s) == (10, 10, 13)
    assert (settings.http.streams, settings.instance) == (StreamSettings(14, 18, "done"), "other")
    assert (settings.adoption.wait_s, settings.adoption.claim_wait_s) == (16, 17)
    http = settings.http
    assert (http.host, http.port, http.max_connections) == ("::1", 15, config.max_calls)
    assert (http.unknown_fields, settings.limits.max_prompts) == ("refuse", 19)
    assert not settings.is_lower_priority_first
    assert GatewaySettings.of(replace(config, openai_priority="lower-first")).is_lower_priority_first


@pytest.mark.parametrize("exact", [True, False])
def test_hashes_of_prompts_are_for_pages_that_are_computed_as_the_workers_do(exact: bool) -> None:
    config = GatewayConfig(load="dummy", model_shape="tiny", device="interpreter", max_context_tokens=160, exact=exact)
    model = load_model_of(config)
    source = resolve_model("dummy:tiny")
    assert model.digest == model_digest(source, "auto", "interpreter", exact=exact)
    assert model.digest != model_digest(source, "auto", "interpreter", exact=not exact)
    assert model.max_context_tokens == 160
    assert load_model_of(replace(config, prefix_hints=False)).digest == ""
