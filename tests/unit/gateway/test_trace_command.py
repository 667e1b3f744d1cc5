"""`weir trace`: one request in the terminal, from what gateways remember."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gateway.test_recent_requests import GUARDED, OPERATOR
from tests.unit.gateway.test_tenants_at_the_frontends import write
from tests.unit.gateway.world import World
from typer.testing import CliRunner

from weir.cli.app import app
from weir.cli.trace import MAX_WIDTH, MIN_WIDTH, waterfall
from weir.core.addresses import free_port
from weir.telemetry.request_record import PhaseShare, RequestEvent, RequestPhase, RequestRecord, RequestSummary
from weir.testing.load import greedy_request, stream

SUMMARY = RequestSummary(
    request_id="1f" * 16,
    client_id="mine",
    gateway_id="gateway-0-00000000",
    trace_id="ab" * 16,
    tenant="acme",
    lane="standard",
    model="bytes",
    model_digest="cd" * 32,
    operation="chat",
    choice=0,
    received_at_s=1000.0,
    life="finished",
    duration_ms=1000.0,
    time_to_first_token_ms=250.0,
    finish_reason="stop",
    error_type="",
    num_prompt_tokens=9,
    num_cached_tokens=3,
    num_output_tokens=5,
    num_dispatches=1,
    num_moves=1,
    num_preemptions=0,
    longest_phase="decode",
    longest_phase_ms=750.0,
    cause="moving to another worker",
)
RECORD = RequestRecord(
    SUMMARY,
    max_tokens=5,
    error="",
    placement_reason="",
    phases=(
        RequestPhase("tokenize", 0.0, 1.0, 1, "", "checking and tokenizing"),
        RequestPhase("prefill", 1.0, 249.0, 1, "prefill-0-aaaaaaaa", "computing the prompt"),
        RequestPhase(
            "decode", 250.0, 750.0, 1, "decode-0-b", "moving to another worker", (PhaseShare("moving", 500.0),)
        ),
    ),
    events=(RequestEvent("adopted", 800.0, 1, 4, "its worker is \x1b[31mgone"),),
)


def ask(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["trace", *arguments], terminal_width=100)
    return result.exit_code, result.output


def test_each_phase_has_its_times_its_bar_in_place_and_its_cause() -> None:
    lines = list(waterfall(RECORD, 100))
    assert lines[0] == f"request {'1f' * 16} (mine), finished (stop)"
    assert "chat by bytes cdcdcdcdcdcdcdcd, lane standard, tenant acme" in lines
    assert "1000.0 ms, first token after 250.0 ms; 9 prompt tokens (3 cached), 5 of the answer" in lines
    rows = {line.split()[0]: line for line in lines if "█" in line}
    assert rows["prefill"].split()[1:3] == ["1.0", "249.0"]
    assert rows["decode"].endswith("moving to another worker")
    bars = {name: (row.index("█"), row.rindex("█")) for name, row in rows.items()}
    assert bars["tokenize"][0] == bars["tokenize"][1] == bars["prefill"][0], "a short one has a cell of its own"
    assert bars["prefill"][1] + 1 == bars["decode"][0]
    width = bars["decode"][1] + 1 - bars["tokenize"][0]
    assert (bars["decode"][1] + 1 - bars["decode"][0]) / width == pytest.approx(0.75, abs=1 / width)
    assert any(line.split() == ["moving", "500.0"] for line in lines)
    assert "longest: decode, 750.0 ms of 1000.0 ms: moving to another worker" in lines
    assert lines[-1] == "800.0 ms: adopted after 4 tokens: its worker is ?[31mgone"


@given(
    st.integers(MIN_WIDTH, MAX_WIDTH),
    st.floats(0, 1e8),
    st.lists(st.tuples(st.floats(0, 1e8), st.floats(0, 1e8)), max_size=8),
    st.text(max_size=300),
)
def test_no_line_is_wider_than_the_terminal_whatever_took_how_long(
    width: int, total_ms: float, spans: list[tuple[float, float]], named: str
) -> None:
    phases = tuple(RequestPhase("decode", start, duration, 16, named, "x" * 40) for start, duration in spans)
    summary = replace(SUMMARY, duration_ms=total_ms, client_id=named)
    lines = list(waterfall(replace(RECORD, summary=summary, phases=phases, error=named), width))
    assert all(len(line) <= width and line.isprintable() for line in lines)


async def test_a_request_is_found_by_its_id_and_the_last_and_the_slowest_by_none(world: World) -> None:
    await stream(world.stub, greedy_request("x", max_tokens=2, request_id="first"))
    await stream(world.stub, greedy_request("x", max_tokens=3, request_id="second"))
    await world.until_idle()
    code, printed = await asyncio.to_thread(ask, "first", "--gateway", world.http_url)
    assert (code, "(first), finished (length)" in printed, "prefill" in printed) == (0, True, True), printed
    code, printed = await asyncio.to_thread(ask, "--last", "--json", "--gateway", world.http_url)
    assert json.loads(printed)["summary"]["client_id"] == "second"
    code, printed = await asyncio.to_thread(ask, "--slowest", "--json", "--gateway", world.http_url)
    assert json.loads(printed)["summary"]["duration_ms"] > 0


async def test_the_gateway_that_has_it_answers_and_one_that_is_gone_does_not_hide_it(world: World) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    await stream(world.stub, greedy_request("x", max_tokens=2, request_id="mine"))
    await world.until_idle()
    for wanted in ("mine", "--last"):
        code, printed = await asyncio.to_thread(ask, wanted, "--gateway", gone, "--gateway", world.http_url)
        assert code == 0, printed
    code, printed = await asyncio.to_thread(ask, "other", "--gateway", gone, "--gateway", world.http_url)
    assert (code, "does not answer" in printed) == (1, True), printed
    code, printed = await asyncio.to_thread(ask, "other/../one", "--gateway", world.http_url)
    assert (code, "'other/../one' is not among those" in printed) == (1, True), printed


async def test_with_keys_in_force_an_operators_is_asked_for(world: World) -> None:
    await write(world, GUARDED)
    code, printed = await asyncio.to_thread(ask, "--last", "--gateway", world.http_url)
    assert (code, "an admin key is needed" in printed) == (1, True), printed
    code, printed = await asyncio.to_thread(ask, "--last", "--gateway", world.http_url, "--admin-key", OPERATOR)
    assert (code, "no gateway remembers any request yet" in printed) == (1, True), printed


def test_what_says_no_request_or_finds_no_stack_ends_with_its_own_code(tmp_path: Path) -> None:
    for arguments in ((), ("id", "--last"), ("--last", "--slowest")):
        assert ask(*arguments)[0] == 2
    code, printed = ask("--last", "--instance", "nowhere", "--runtime-dir", str(tmp_path))
    assert (code, "nowhere is not running here" in printed) == (3, True), printed
