"""A load on a real gateway in this process, over HTTP and gRPC, and a client's own lateness."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from rich.console import Console
from tests.unit.gateway.world import World, open_world

from weir.bench.serving.arrivals import ArrivalPlan
from weir.bench.serving.config import Backend, LoadConfig
from weir.bench.serving.datasets import MultiTurn, RandomPrompts
from weir.bench.serving.figures import NO_TARGETS, Reporting, more_figures, summarize
from weir.bench.serving.load import make_jobs, run_jobs, run_load, wait_ready, warm_up
from weir.bench.serving.records import BenchRequest, ServedRequest
from weir.bench.serving.serve import Run, Saving, block, described, detailed, lateness_warning, main, progress_bar

EVENT = 'data: {"choices": [{"text": "a"}]}\n\n'


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world() as world:
        yield world


def asking(world: World, backend: Backend, **fields: object) -> LoadConfig:
    url = world.grpc_address if backend.startswith("grpc") else world.http_url
    config = LoadConfig(url, "bytes", backend, num_prompts=6, timeout_s=30.0, sends_texts=True)
    return replace(config, dataset=RandomPrompts(5, 4), max_concurrency=3, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["openai", "openai-chat", "grpc", "grpc-chat"])
async def test_every_backend_sees_the_same_answers_and_counts(world: World, backend: Backend) -> None:
    config = asking(world, backend)
    await wait_ready(config, 20.0)
    done: list[ServedRequest] = []
    records, duration_s = await run_jobs(config, make_jobs(config), on_done=done.append)
    assert [record.error for record in records] == [""] * 6
    assert {record.text for record in records} == {"hell"}
    assert {(record.output_len, record.status) for record in records} == {(4, 200)}
    assert sorted(map(id, done)) == sorted(map(id, records))
    figures = summarize(records, duration_s)
    assert (figures["completed"], figures["total_output_tokens"]) == (6, 24)
    assert figures["total_input_tokens"] == sum(record.input_len for record in records) > 6 * 5  # bytes, not words
    assert all(0 < record.ttft_s <= record.latency_s for record in records)
    assert 1 <= figures["max_concurrent_requests"] <= 3


@pytest.mark.parametrize("backend", ["openai-chat", "grpc-chat"])
async def test_every_turn_of_a_chat_holds_all_before_it(world: World, backend: Backend) -> None:
    config = replace(asking(world, backend), num_prompts=3, dataset=MultiTurn(3, 2, 2, 4))
    records, _ = await run_load(config)
    assert [(record.turn, record.error) for record in records] == [(0, ""), (1, ""), (2, "")]
    prompts = [bytes(start.prompt_token_ids).decode() for start in world.prefill.named("start")]
    (chat,) = make_jobs(config)
    said = [str(chat.prompt), *(turn.text for turn in chat.follow_ups)]
    for number, prompt in enumerate(prompts):
        assert [text in prompt for text in said] == [turn <= number for turn in range(3)]
        assert prompt.count("hell") == number
        assert chat.system in prompt
    assert records[0].input_len < records[1].input_len < records[2].input_len


@pytest.mark.parametrize("backend", ["openai", "grpc"])
async def test_fields_of_a_request_reach_the_worker_over_both_protocols(world: World, backend: Backend) -> None:
    extra = {"top_k": 7, "cache_prompt": False, "stop_token_ids": [9]}
    await warm_up(asking(world, backend, extra_body=extra, temperature=0.5, request_id_prefix="bench-"), 1)
    (start,) = world.prefill.named("start")
    assert (start.sampling.top_k, start.sampling.temperature, start.skips_prefix_cache) == (7, 0.5, True)
    assert list(start.stop_token_ids) == [9]


def test_a_field_that_grpc_does_not_have_is_named() -> None:
    with pytest.raises(ValueError, match="extra-body wings: gRPC has"):
        make_jobs(LoadConfig("h:1", "m", "grpc", extra_body={"wings": 2}))


@pytest.mark.parametrize("backend", ["openai", "grpc"])
async def test_a_server_that_is_not_there_is_an_error_of_each_request(backend: Backend) -> None:
    nobody = LoadConfig("127.0.0.1:1" if backend == "grpc" else "http://127.0.0.1:1", "m", backend, num_prompts=2)
    records, _ = await run_load(nobody)
    assert all(record.error for record in records)
    with pytest.raises(RuntimeError, match="requests to warm up"):
        await warm_up(nobody, 1)
    with pytest.raises(RuntimeError, match="not ready within"):
        await wait_ready(nobody, 0.05)


async def answered(config: LoadConfig, jobs: list[BenchRequest], handler: object) -> list[ServedRequest]:
    transport = httpx.MockTransport(handler)  # type: ignore[arg-type]
    records, _ = await run_jobs(config, jobs, transport=transport)
    return records


async def test_in_an_open_loop_a_client_that_is_late_counts_its_lateness_into_the_latency() -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        import time  # noqa: PLC0415

        time.sleep(0.15)
        return httpx.Response(200, text=EVENT + "data: [DONE]\n\n")

    jobs = [BenchRequest([1], 1, at_s=at_s) for at_s in (0.0, 0.01, 0.02)]
    config = LoadConfig("http://x", "m", max_concurrency=None, arrivals=ArrivalPlan(100.0))
    records = await answered(config, jobs, answer)
    last = records[-1]
    assert last.late_s > 0.1
    assert last.ttft_s >= last.late_s
    assert last.started_s - records[0].started_s == pytest.approx(0.02)
    figures = {**summarize(records, 1.0), **more_figures(records, 1.0, NO_TARGETS)}
    assert "this client was late" in lateness_warning(figures)
    assert "Client Lateness" in block(figures, config)
    on_time = {**figures, "p99_client_lateness_ms": 0.01}
    assert lateness_warning(on_time) == ""


async def test_what_waits_for_room_here_starts_when_it_has_it() -> None:
    running = most = 0

    async def answer(_: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return httpx.Response(200, text=EVENT + "data: [DONE]\n\n")

    records = await answered(
        LoadConfig("http://x", "m", max_concurrency=2), [BenchRequest([1], 1) for _ in range(6)], answer
    )
    assert most == 2
    assert [record.queued_s > 0 for record in records] == [False] * 2 + [True] * 4
    assert {record.late_s for record in records[2:]} == {0.0}
    for record in records[2:]:
        assert record.started_s >= min(other.started_s + other.latency_s for other in records)


async def test_an_answer_that_never_ends_is_given_up_at_its_deadline() -> None:
    async def answer(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    (record,) = await answered(LoadConfig("http://x", "m", timeout_s=0.05), [BenchRequest([1], 1)], answer)
    assert record.error == "no whole answer within 0.05 s"


async def test_where_a_server_counts_nothing_a_chunk_is_a_token() -> None:
    text = 2 * EVENT + "data: [DONE]\n\n"
    (record,) = await answered(
        LoadConfig("http://x", "m"), [BenchRequest([1, 2], 9)], lambda _: httpx.Response(200, text=text)
    )
    assert (record.input_len, record.output_len) == (2, 2)


def test_a_result_that_cannot_be_written_is_said_before_anything_is_asked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"result-filename .* cannot be written"):
        main(Run(LoadConfig("http://127.0.0.1:1", "m")), Saving(tmp_path), json_output=False)


def test_a_run_whose_requests_fail_ends_with_1_and_keeps_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "result.json"
    run = Run(LoadConfig("http://127.0.0.1:1", "m", num_prompts=2), Reporting({"ttft": 1.0}))
    assert main(run, Saving(path, is_detailed=True), json_output=False) == 1
    shown = capsys.readouterr()
    assert "Failed requests:                        2" in shown.out
    assert "Request goodput (req/s):                0.00" in shown.out
    assert "failed: ConnectError" in shown.err
    kept = json.loads(path.read_text())
    assert (kept["failed"], len(kept["errors"])) == (2, 2)


async def test_a_role_alone_is_no_first_token_and_the_servers_count_is_taken() -> None:
    chunks = [
        '{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
        '{"choices": [{"delta": {"content": "a"}}]}',
        '{"choices": [{"delta": {"content": "b"}}]}',
        '{"choices": [{"delta": {}, "finish_reason": "stop"}]}',
        '{"choices": [], "usage": {"prompt_tokens": 77, "completion_tokens": 2}}',
        "[DONE]",
    ]
    text = "".join(f"data: {chunk}\n\n" for chunk in (*chunks,)) + ": a comment\n\n"
    config = LoadConfig("http://x", "m", "openai-chat")
    (record,) = await answered(config, [BenchRequest("hi", 2)], lambda _: httpx.Response(200, text=text))
    assert (record.text, len(record.gaps_s), record.input_len, record.output_len) == ("ab", 1, 77, 2)


def test_the_json_has_vllms_keys() -> None:
    config = LoadConfig("http://x", "m", max_concurrency=None)
    record = ServedRequest(3, 1.0, 0.5, [0.1], 0.6, 2, "ab")
    figures = {**summarize([record], 1.0), **more_figures([record], 1.0, NO_TARGETS)}
    whole = {**described(config, Saving(Path("x"), label="l", metadata={"v": "1"})), **figures, **detailed([record])}
    wanted = (
        "date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency"
        " duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput"
        " output_throughput total_token_throughput input_lens output_lens ttfts itls latencies start_times queue_times"
        " generated_texts errors max_output_tokens_per_s max_concurrent_requests"
    )
    names = ("ttft", "tpot", "itl", "e2el")
    latencies = {f"{key}_{name}_ms" for key in ("mean", "median", "std", "p99") for name in names}
    assert set(wanted.split()) | latencies <= whole.keys()
    assert (whole["request_rate"], whole["max_concurrency"], whole["v"]) == ("inf", None, "1")
    assert json.loads(json.dumps(whole, allow_nan=False))["itls"] == [[0.1]]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_bar_is_for_terminals(is_terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100)
    with progress_bar(2, console=console) as advance:
        advance(ServedRequest(1, 0.0))
        advance(ServedRequest(1, 0.0, error="HTTP 500"))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("2/2" in shown, "1 failed" in shown) == (is_terminal, is_terminal)
    assert bool(shown) == is_terminal
