"""What a load consists of (mixes, arrivals, traces, keys), how it is sent, and its figures."""

from collections import Counter
from pathlib import Path

import httpx
import pytest

from weir.bench.serving.config import LoadConfig
from weir.bench.serving.datasets import TraceReplay
from weir.bench.serving.figures import summarize, summarize_groups
from weir.bench.serving.jobs import Mix, mixed, random_prompts
from weir.bench.serving.load import check_keys, make_jobs, read_keys, run_jobs
from weir.bench.serving.records import BenchRequest, ServedRequest
from weir.bench.serving.serve import block
from weir.sim.workloads.trace_file import TraceError

CAPTURE = """\
{"arrival_s": 10.0, "num_prompt_tokens": 320, "num_output_tokens": 8, "prefix_blocks": [7], "lane": "batch"}
{"arrival_s": 12.0, "num_prompt_tokens": 320, "num_output_tokens": 40, "prefix_blocks": [7], "tenant": "b"}
{"arrival_s": 16.0, "num_prompt_tokens": 32, "num_output_tokens": 4, "ttft_target_s": 0.5, "deadline_s": 9}
"""


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    path = tmp_path / "capture.jsonl"
    path.write_text(CAPTURE)
    return path


def test_a_mix_gives_each_name_its_share_and_the_same_draw_for_the_same_seed() -> None:
    mix = Mix.parse("interactive=1, batch=3")
    sampled = mix.draw(4000, seed=1)
    assert sampled == mix.draw(4000, seed=1)
    assert sampled != mix.draw(4000, seed=2)
    assert Counter(sampled)["batch"] == pytest.approx(3000, rel=0.05)


@pytest.mark.parametrize("text", ["a", "a=", "a=x", "a=0", "a=-1", "a=inf", "=1", "a=1,a=2", "a=1,,b=2"])
def test_a_mix_that_cannot_be_is_refused_with_the_part_that_is_wrong(text: str) -> None:
    with pytest.raises(ValueError, match="must be NAME=SHARE"):
        Mix.parse(text)


def test_a_trace_keeps_its_order_lengths_and_what_requests_share(capture: Path) -> None:
    jobs = TraceReplay(capture, time_scale=0.5, prompt_scale=2, output_scale=4).requests(10, seed=0)
    assert [job.at_s for job in jobs] == [0.0, 1.0, 3.0]
    assert [(len(job.prompt), job.output_len) for job in jobs] == [(160, 2), (160, 10), (16, 1)]
    # A block of the trace is 512 tokens, half of it here, and so longer than these prompts.
    assert jobs[0].prompt == jobs[1].prompt
    assert jobs[2].prompt != jobs[0].prompt[:16]
    assert [job.lane for job in jobs] == ["batch", "", ""]
    assert [job.tenant for job in jobs] == ["", "b", ""]
    assert jobs[2].body == {"ttft_target_ms": 500, "deadline_ms": 9000}
    assert len(TraceReplay(capture).requests(2, seed=0)) == 2


def test_a_mix_goes_over_the_lanes_of_a_trace_and_leaves_them_without_one(capture: Path) -> None:
    jobs = TraceReplay(capture).requests(3, seed=0)
    assert [job.lane for job in mixed(jobs, Mix.parse("interactive=1"), Mix(), 0)] == ["interactive"] * 3
    assert [job.lane for job in mixed(jobs, Mix(), Mix(), 0)] == ["batch", "", ""]


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"missing\.csv"):
        make_jobs(LoadConfig("http://x", "m", dataset=TraceReplay(tmp_path / "missing.csv")))


def test_keys_come_from_a_file_and_every_tenant_of_the_mix_needs_one(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# tenants\na = key-a\n\nb=key=b\n")
    keys = read_keys(path, "mine")
    assert keys == {"": "mine", "a": "key-a", "b": "key=b"}
    check_keys(LoadConfig("http://x", "m", tenants=Mix.parse("a=1,b=2"), api_keys=keys))
    with pytest.raises(ValueError, match="no key of c"):
        check_keys(LoadConfig("http://x", "m", tenants=Mix.parse("a=1,c=2"), api_keys=keys))
    path.write_text("a=1\nsecret\n")
    with pytest.raises(ValueError, match="line 2: must be NAME=KEY") as refused:
        read_keys(path, "")
    assert "secret" not in str(refused.value)


def test_a_configuration_does_not_show_its_keys() -> None:
    assert "secret" not in repr(LoadConfig("http://x", "m", api_keys={"a": "secret"}))


def test_figures_of_lanes_and_tenants_are_those_of_their_requests() -> None:
    fast = ServedRequest(10, 0.0, ttft_s=0.1, latency_s=0.2, output_len=2, lane="interactive", tenant="a", status=200)
    slow = ServedRequest(10, 0.0, ttft_s=0.9, latency_s=1.0, output_len=4, lane="batch", tenant="b", status=200)
    refused = ServedRequest(10, 0.0, error="HTTP 429", lane="batch", tenant="b", status=429)
    groups = summarize_groups([fast, slow, refused], duration_s=2.0)
    assert groups["lanes"]["interactive"]["p99_ttft_ms"] == pytest.approx(100)
    batch = groups["lanes"]["batch"]
    assert (batch["completed"], batch["failed"], batch["refused"]) == (1, 1, 1)
    assert batch["output_throughput"] == pytest.approx(2.0)
    assert groups["tenants"]["a"]["mean_ttft_ms"] == pytest.approx(100)
    printed = block(summarize([fast, slow, refused], 2.0), LoadConfig("http://x", "m"), groups)
    assert "interactive" in printed
    assert "- Tenants (ms) -" in printed
    assert summarize_groups([ServedRequest(1, 0.0)], 1.0) == {}


async def test_each_request_says_its_lane_and_shows_its_tenants_key(capture: Path) -> None:
    seen: list[tuple[str, str]] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        lane = "batch" if b'"lane":"batch"' in request.content else ""
        seen.append((lane, request.headers.get("authorization", "")))
        return httpx.Response(429, json={"error": {"message": "later"}})

    config = LoadConfig("http://x", "m", dataset=TraceReplay(capture, time_scale=0.0), api_keys={"": "k", "b": "key-b"})
    records, _ = await run_jobs(config, make_jobs(config), transport=httpx.MockTransport(answer))
    assert sorted(seen) == [("", "Bearer k"), ("", "Bearer key-b"), ("batch", "Bearer k")]
    assert [record.status for record in records] == [429] * 3


async def error_of(answer: str) -> str:
    """What a request comes to whose stream has this text."""
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=answer))
    (record,), _ = await run_jobs(LoadConfig("http://x", "m"), [BenchRequest([1], 1)], transport=transport)
    return record.error


async def test_a_stream_that_ends_well_is_no_error_and_one_that_breaks_off_or_is_no_json_is() -> None:
    event = 'data: {"choices": [{"text": "a"}]}\n\n'
    assert await error_of(event + "data: [DONE]\n\n") == ""
    assert await error_of(event) == "the stream ended before [DONE]"
    assert (await error_of("data: {broken\n\n")).startswith("JSONDecodeError")


def test_figures_follow_their_definitions() -> None:
    steady = ServedRequest(input_len=10, started_s=0.0, ttft_s=0.5, gaps_s=[0.1, 0.3], latency_s=0.9, output_len=3)
    failed = ServedRequest(input_len=99, started_s=0.0, error="HTTP 503")
    result = summarize([steady, failed], duration_s=2.0)
    assert (result["completed"], result["failed"]) == (1, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (10, 3)
    assert result["output_throughput"] == pytest.approx(1.5)
    assert result["median_ttft_ms"] == pytest.approx(500)
    assert result["median_tpot_ms"] == pytest.approx(200)
    assert result["p99_itl_ms"] == pytest.approx(298)
    assert "Successful requests:                    1" in block(result, LoadConfig("http://x", "m"))


def test_prompts_repeat_with_the_seed() -> None:
    assert random_prompts(3, 7, seed=4) == random_prompts(3, 7, seed=4)
    assert [len(prompt) for prompt in random_prompts(3, 7, seed=4)] == [7, 7, 7]
