"""What becomes of answers that a server does not take."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.trace import NoOpTracer
from tests.contract.worlds import NatsServer

from weir.bus.endpoint import BusEndpoint
from weir.bus.nats import NatsBus
from weir.bus.subjects import Subjects
from weir.core.errors import Unavailable
from weir_gateway.frontends.responses.store import ResponseStore
from weir_scheduler.store_maker import StoreMaker

RESPONSE_ID = "resp_" + "0" * 32


@pytest.fixture
def full_server(tmp_path: Path) -> Iterator[NatsServer]:
    """Its one account has no room for another bucket."""
    configuration = tmp_path / "nats.conf"
    configuration.write_text(
        "accounts { one: { jetstream: { max_streams: 1 }, users: [ { user: u, password: p } ] } }\nno_auth_user: u\n"
    )
    server = NatsServer(tmp_path, "--config", str(configuration))
    server.start()
    yield server
    server.kill()


async def test_where_no_bucket_can_be_made_answers_are_not_kept_and_look_ups_say_so(full_server: NatsServer) -> None:
    bus = await NatsBus.connect(full_server.url, name="contract-test")
    await bus.bucket("the_only_one", durable=True)
    endpoint = BusEndpoint(bus, NoOpTracer())
    await StoreMaker(bus, Subjects("test"), lambda _: True).serve(endpoint)
    store = ResponseStore(bus, endpoint, Subjects("test"))
    assert not await store.try_keep("a", RESPONSE_ID, b"{}", ({"role": "user", "content": "x"},))
    assert store.metrics()["responses_lost_total"] == 1
    assert await store.try_get("a", RESPONSE_ID) is None
    full_server.freeze()
    with pytest.raises(Unavailable, match="cannot be looked up now"):
        await store.try_get("a", RESPONSE_ID)
    full_server.thaw()
    await bus.close()
