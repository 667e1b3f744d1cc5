"""A gateway's logs, at their most talkative too, and its spans have nothing of prompts, answers and keys."""

import logging

import pytest
from tests.unit.gateway.marked import MARKS, PROMPT, ask_everything
from tests.unit.gateway.test_access import KEY_A
from tests.unit.gateway.test_recent_requests import GUARDED, OPERATOR
from tests.unit.gateway.test_tenants_at_the_frontends import write
from tests.unit.gateway.world import World

from weir.runtime.logs import JsonFormatter, TextFormatter


async def test_what_is_asked_rightly_and_wrongly_is_in_no_log_and_no_span(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await write(world, GUARDED)
    with caplog.at_level(logging.DEBUG, logger="weir"), caplog.at_level(logging.DEBUG, logger="weir_gateway"):
        statuses, said = await ask_everything(world.http_url, world.grpc_address, KEY_A)
    await world.until_idle()
    assert {200, 400, 401} <= statuses, statuses
    assert 500 not in statuses
    assert PROMPT in said
    formatters = (TextFormatter("gateway", "g"), JsonFormatter("gateway", "g"))
    own = [record for record in caplog.records if record.name.startswith("weir")]
    logged = "\n".join(formatter.format(record) for record in own for formatter in formatters)
    spans = [span.to_json() for span in world.spans.get_finished_spans()]
    assert len(spans) >= 10
    for mark in (*MARKS, KEY_A, OPERATOR):
        assert mark not in logged
        assert [line for span in spans for line in span.splitlines() if mark in line] == []
